"""The values that cross module boundaries: frozen dataclasses, no framework.

Glossary: `amax` is max |x|; `scale` is what codes are multiplied by; a *site* is one quantizable module; a *step*
makes the output tensors of one source tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.dtypes import DTYPES
from bridge.errors import SourceError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """Name, logical shape and dtype of a tensor. `shape` of a 4-bit tensor counts values, not bytes.

    `across`: its source stores it across its rows, so that any of them are read with all others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    across: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return (self.size * DTYPES[self.dtype].bits + 7) // 8


CACHE = "KV cache"  # what it is called where modules are named: it is none
MOST_AXES = 64  # NumPy's


def shape_problem(shape: Sequence[int]) -> str:
    """Say why no tensor of a file has such a shape; "" where one may. An extent of 0 does not excuse the others."""
    if len(shape) > MOST_AXES:
        return f"has {len(shape)} axes; at most {MOST_AXES} are supported"
    if math.prod(max(1, n) for n in shape) >= 1 << 60:  # bytes, too, are then what a signed 64-bit number counts
        return f"has shape ({', '.join(map(str, shape))}), which no memory holds"
    return ""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when asked for: `read()` returns its storage array (see `bridge.dtypes`)."""

    spec: TensorSpec
    reader: Callable[[], np.ndarray] = field(compare=False)

    def read(self) -> np.ndarray:
        """Read the tensor and hold it to its promise: shape and storage dtype of the spec, or SourceError."""
        import numpy as np

        array = self.reader()
        want = (self.spec.shape, np.dtype(DTYPES[self.spec.dtype].storage))
        if (array.shape, array.dtype) != want:
            raise SourceError(f"{self.spec.name}: promised {want}, the source gave {(array.shape, array.dtype)}")
        return array


@dataclass(frozen=True)
class Numeric:
    """How numbers are coded: the dtype of the codes and what one scale covers.

    `per`: "tensor", "channel" (one scale per `out`), "block" (`block` values along `in`; two numbers: `out` x `in`),
    "token".
    `scale_dtype`: "float32"; "float8_e4m3fn" means block scales in fp8 under one float32 scale per tensor (NVFP4);
    "float8_e8m0fnu" means powers of two (MX). `dynamic`: scales are computed when the model runs (activations only).
    """

    dtype: str
    per: str
    block: tuple[int, ...] = ()
    scale_dtype: str = "float32"
    dynamic: bool = False

    @property
    def maxbound(self) -> float:
        """The largest magnitude a code stands for: scale = amax / maxbound."""
        return MAXBOUND[self.dtype]


# ModelOpt's `maxbound`: int codes use the symmetric range, although -128 and -8 are legal codes.
MAXBOUND = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0, "float4_e2m1fn": 6.0}


@dataclass(frozen=True)
class Format:
    """What happens to one site: weight numerics (one after the other), input numeric, algorithm."""

    weight: tuple[Numeric, ...]
    input: Numeric | None = None
    algorithm: str = "max"  # "max", "smoothquant", "awq"; further calibrators in mappings/schemes

    @property
    def prescales(self) -> bool:
        """True when the input is multiplied by a per-`in` factor that was divided out of the weight."""
        return self.algorithm in ("smoothquant", "awq")


@dataclass(frozen=True)
class Coding:
    """How a target spells the codes and scales of one and the same format; equal formats may differ here only.

    `cast`: the weight is rounded to this dtype before it is coded ("" leaves it); its amax is taken before that.
    `packed`: two 4-bit codes share a byte along this axis, "in" or "out", the even one in the low nibble; "int32":
    eight share an int32 along `in`, each plus 8, the first in the lowest bits (compressed-tensors).
    `quotient`: "float32", or "weight" where weight / scale is rounded to the weight's dtype before it is coded.
    `scale_dtype`: float scales are rounded to this dtype, and the weight is divided by what was rounded.
    `bound`: a scale is amax / bound; 0 takes the largest code. `reciprocal`: the scale above NVFP4's blocks is rounded
    and stored as 1 / scale (compressed-tensors). `least`: no KV scale is below this. `values`: not codes are stored but
    what they stand for, times scales in this same float dtype, so that coding them once more gives the codes (Tripy).
    """

    cast: str = ""
    packed: str = "in"
    quotient: str = "float32"
    scale_dtype: str = "float32"
    bound: float = 0.0
    reciprocal: bool = False
    least: float = 0.0
    values: str = ""

    @property
    def scale_is(self) -> str:
        """The dtype of float scales as they are stored."""
        return self.values or self.scale_dtype


@dataclass(frozen=True)
class Slice:
    """A rectangle of one source tensor, in its stored axes; None takes a whole axis.

    `module` is the site it belongs to, whose pre-scale smooths it. `transposed`: stored [in, out], read as [out, in].
    An empty `source` stands for zeros, which pad: `rows` and `cols` say how many. `rope`: rows of one head, where they
    are reordered: > 0 from halves (rotate-half) to pairs side by side, < 0 back. `expert`: which matrix of a tensor of
    three axes it lies in. `step`: of the rows that are read, one in so many is taken, beginning with the first.
    """

    source: str
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    module: str = ""
    transposed: bool = False
    rope: int = 0
    expert: int | None = None
    step: int = 1

    @property
    def held(self) -> bool:
        """True where its rows are not rows of the source one after the other."""
        return self.transposed or self.expert is not None or self.step > 1

    @property
    def inner(self) -> tuple[int, int] | None:
        """The part of `in` that it takes: of its rows where it is stored [in, out]."""
        return self.rows if self.transposed else self.cols


@dataclass(frozen=True)
class Site:
    """One quantizable module of an architecture, in checkpoint names.

    `layout` is how the checkpoint stores the weight: "out_in" (Linear), "in_out" (Conv1D), "conv" (out, in / groups,
    kernel...), "stack_out_in" or "stack_in_out" (all experts of a layer, one after the other; `module` is then the name
    of the tensor). `keep` is the reason why it stays unquantized unless a recipe names it ("" where it is quantized).
    `shares` names a group whose members share one per-tensor weight amax, because the model holds them as one matrix.
    """

    module: str
    weight: str
    layout: str
    roles: tuple[str, ...] = ()
    layer: int | None = None
    expert: int | None = None
    keep: str = ""
    shares: str = ""

    @property
    def stacked(self) -> bool:
        """True where the tensor holds all experts of a layer."""
        return self.layout.startswith("stack")


@dataclass(frozen=True)
class InputGroup:
    """Modules that read one and the same tensor, in the order in which the model runs them.

    `norm` is the module whose output that tensor is, "" where it is none's; `alone` is True when nothing but the group
    reads it, so that a pre-scale may be multiplied into the norm; `plus_one` when the norm multiplies by 1 + weight.
    """

    modules: tuple[str, ...]
    norm: str = ""
    alone: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class Structure:
    """What the plan must know of an architecture: from its table, or traced with torch where it has none.

    `attention`: attention modules by layer, where K and V can be quantized. `tied`: alias -> the tensor that is
    stored. `ignored`: source tensor -> why it is not carried. `roles`: source tensor -> the roles it holds, empty
    without a table. `groups`: who reads the same input, as modules of `sites`. `order`: every tensor of the
    checkpoint (tied aliases too) in the order of the model's modules. `embeddings`: modules whose weight is looked up,
    not multiplied. `ungrouped`: why `groups` are not known, "" where they are. `traced`: True when torch was needed to
    find this out.
    """

    architecture: str
    sites: tuple[Site, ...]
    attention: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    groups: tuple[InputGroup, ...] = ()
    order: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    ungrouped: str = ""
    traced: bool = False


@dataclass(frozen=True)
class Program:
    """A program at the other end: it wrote what a source reads, or loads what a target writes.

    `proof`: what that rests on, and what was not run. `tests`: files of the repository that hold it. The documentation
    says these words; a source and a target say them beside the code that they are about.
    """

    name: str
    versions: str
    proof: str
    tests: tuple[str, ...]


def plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as JSON has them; `dataclasses.asdict` copies every leaf, far slower."""
    if dataclasses.is_dataclass(value):
        return {key: plain(item) for key, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
