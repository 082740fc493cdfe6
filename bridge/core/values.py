"""Values that cross module boundaries: frozen dataclasses, no framework.

Glossary: `amax` is max |x|; codes are multiplied by the `scale`; a *site* is one quantizable module; a *step* makes the
output tensors of one source tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from bridge.core.dtypes import DTYPES, FLOATING
from bridge.core.errors import SourceError
from bridge.core.records import later

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """Name, logical shape and dtype of a tensor. `shape` of a 4-bit tensor counts values, not bytes.

    `across`: its source stores it transposed, so that reading any row reads all of them.
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
        return _nbytes(self.dtype, self.shape)


@lru_cache(1 << 16)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype].nbytes(math.prod(shape))


def main_dtype(specs: Iterable[TensorSpec], default: str = "float32", among: Collection[str] = FLOATING) -> str:
    """Return the float dtype of most values of tensors; `default` if none has one of `among`."""
    sizes = Counter[str]()
    for spec in specs:
        if spec.dtype in among:
            sizes[spec.dtype] += spec.size
    return max(sizes, key=lambda name: sizes[name], default=default)


CACHE = "KV cache"  # its name in lists of modules, although it is not a module
MAX_AXES = 64  # NumPy's limit


def shape_problem(shape: Sequence[int]) -> str:
    """Say why a shape is invalid; "" if it is valid. An extent of 0 does not excuse the others."""
    if len(shape) > MAX_AXES:
        return f"has {len(shape)} axes; at most {MAX_AXES} are supported"
    if math.prod(max(1, n) for n in shape) >= 1 << 60:  # below, the bytes fit a signed 64-bit number, too
        return f"has shape ({', '.join(map(str, shape))}), which no memory holds"
    return ""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on request: `read()` returns its storage array (see `bridge.core.dtypes`)."""

    spec: TensorSpec
    reader: Callable[[], np.ndarray] = field(compare=False)

    def read(self) -> np.ndarray:
        """Read the tensor; SourceError unless it has the shape and storage dtype of the spec."""
        import numpy as np

        array = self.reader()
        want = (self.spec.shape, np.dtype(DTYPES[self.spec.dtype].storage))
        if (array.shape, array.dtype) != want:
            raise SourceError(f"{self.spec.name}: promised {want}, the source gave {(array.shape, array.dtype)}")
        return array


# How scales of blocks are chosen. "mse": those with the least error. "four_over_six": the better of two, under which
# the largest value of a block has the code 6 or 4; FP4 has no number between. "either": the largest value of a block
# has the code of the largest magnitude, -8 of INT4, so that its scale may be negative. "positive": amax / 7.5 of INT4,
# with which all codes are used, too. With an importance matrix those of the least weighted error, of such signs.
# "weighted": of all that FP4's blocks may have, the one of the least error, weighted if there is an importance matrix.
MSE, FOUR_OVER_SIX, EITHER, POSITIVE, WEIGHTED = SEARCHES = ("mse", "four_over_six", "either", "positive", "weighted")


BY_SIGN = (EITHER, POSITIVE)
OURS = (*BY_SIGN, WEIGHTED)  # which may be weighted by an importance matrix, and under which our GPTQ chooses codes

# MLX's affine groups, by bits of a code: each has a scale and a bias, so that its range may lie anywhere.
AFFINE = {"affine2": 2, "affine3": 3, "affine4": 4, "affine5": 5, "affine6": 6, "affine8": 8}

# Integers that no tensor has as its dtype: their codes follow each other in words of 32 bits.
NARROW = {"int2": 2, "int3": 3, "int5": 5, "int6": 6}


def code_bits(dtype: str) -> int:
    """The bits of a code.

    >>> code_bits("affine3"), code_bits("int4"), code_bits("int5")
    (3, 4, 5)
    """
    return AFFINE.get(dtype) or NARROW.get(dtype) or DTYPES[dtype].bits


@dataclass(frozen=True)
class Numeric:
    """A number format: the dtype of the codes and the values that share a scale.

    `per`: "tensor", "channel" (one scale per `out`), "block" (`block` values along `in`; two numbers: `out` x `in`),
    "token".
    `scale_dtype`: "float32"; "float8_e4m3fn" means block scales in fp8 under one float32 scale per tensor (NVFP4);
    "float8_e8m0fnu" means powers of two (MX). `dynamic`: scales are computed when the model runs (activations only).
    `constant`: the amax of activations that is taken unmeasured; 0 if it is measured. `search`: how the scales of a
    weight's blocks are chosen, one of `SEARCHES`; "" takes those of amax. `zero_points`: each block has a code that
    stands for 0, so that a value is (code - zero point) * scale.
    """

    dtype: str
    per: str
    block: tuple[int, ...] = ()
    scale_dtype: str = "float32"
    dynamic: bool = False
    constant: float = 0.0
    search: str = ""
    zero_points: bool = later(False)

    @property
    def maxbound(self) -> float:
        """The largest magnitude of a code: scale = amax / maxbound."""
        return MAXBOUND[self.dtype]

    @property
    def two_level(self) -> bool:
        """Whether the scales of blocks are FP8, under one scale for all: NVFP4."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def static(self) -> bool:
        """Whether a scale is stored with the model: of NVFP4 activations, the one above those of the blocks."""
        return not self.dynamic or self.two_level

    @property
    def largest_scale(self) -> float:
        """The largest of NVFP4's block scales in FP8: the scale above them is amax / (maxbound * this).

        Blocks of 32 are W4A8_NVFP4_FP8's, whose kernel turns code * block scale into FP8: the product may be 448.
        """
        if self.block == (32,) and self.two_level:
            return 448.0 / self.maxbound
        return 256.0 if self.search == FOUR_OVER_SIX else 448.0


LLM_COMPRESSOR = "llm-compressor"

# ModelOpt's `maxbound`: int codes use the symmetric range, although -128 and -8 are legal codes.
MAXBOUND = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0, "float4_e2m1fn": 6.0} | {
    dtype: 2.0 ** (bits - 1) - 1 for dtype, bits in NARROW.items()
}


@dataclass(frozen=True)
class Format:
    """The quantization of one site: weight numerics (one after the other), input numeric, algorithm.

    `rounding`: whose numbers the scales are, "" ModelOpt's, or "llm-compressor", whose integer scales are amax over
    half of the code range, and whose scale above NVFP4's blocks is rounded to the weight's dtype.
    """

    weight: tuple[Numeric, ...]
    input: Numeric | None = None
    # "max", "smoothquant", "awq", "awq_clip", "awq_full", "imatrix", "local_hessian", "gptq", "signround"
    algorithm: str = "max"
    rounding: str = later("")

    @property
    def prescales(self) -> bool:
        """Whether the input is multiplied by a per-`in` factor that the weight is divided by."""
        return self.algorithm in ("smoothquant", "awq", "awq_full")

    @property
    def clipped(self) -> bool:
        """Whether calibration decides which part of its amax the scale of each block of the weight covers."""
        return self.algorithm in ("awq_clip", "awq_full")

    @property
    def weighted(self) -> bool:
        """Whether codes or scales are written with the least error weighted by the mean square of each input."""
        return self.algorithm == "imatrix" or (self.ordered and not self.rescaled)

    @property
    def watched(self) -> bool:
        """Whether calibration watches the inputs of the plain model, without ModelOpt."""
        return self.algorithm == "imatrix" or self.ordered

    @property
    def ordered(self) -> bool:
        """Whether calibration chooses codes column by column, those with the largest inputs first: our GPTQ, and where
        SignRound starts.
        """
        return self.compensated and self.weight[0].search in OURS

    @property
    def learned(self) -> bool:
        """Whether calibration learns codes, and a factor of each scale, by the output of the layer: SignRound."""
        return self.algorithm == "signround"

    @property
    def compensated(self) -> bool:
        """Whether calibration chooses the codes: each column's error is made up for by the columns after it."""
        return self.algorithm in ("gptq", "signround")

    @property
    def changes_weights(self) -> bool:
        """Whether calibration replaces the weight in the model that it runs: by a smoothed one, or by GPTQ's choice."""
        return self.prescales or self.compensated

    @property
    def rescaled(self) -> bool:
        """Whether calibration chooses the scales of the weight's blocks."""
        return self.algorithm == "local_hessian" or (self.compensated and self.weight[0].two_level)

    @property
    def chosen(self) -> bool:
        """Whether calibration chooses codes or scales, so that it belongs to one model's weights."""
        return self.compensated or self.rescaled


def with_positive_scales(format_: Format) -> Format:
    """A format whose scales may have either sign, as one for programs that read positive ones; any other as it is."""
    weight = tuple(replace(one, search=POSITIVE) if one.search == EITHER else one for one in format_.weight)
    return format_ if weight == format_.weight else replace(format_, weight=weight)


@dataclass(frozen=True)
class Encoding:
    """How a target stores the codes and scales of a format.

    `cast`: the weight is rounded to this dtype before it is quantized ("" leaves it); its amax is taken before that.
    `packed`: two 4-bit codes share a byte along this axis, "in" or "out", the even one in the low nibble; "int32":
    eight share an int32 along `in`, each plus 8, the first in the lowest bits (compressed-tensors, GPTQ); "awq": eight
    share an int32 along `out`, each plus 8, in the order of AutoAWQ's kernels; "uint32": codes
    follow each other along `in`, integers without a sign, and each block has a bias beside its scale (MLX); those of
    `bridge.core.dtypes.BLOCKS`: ggml's blocks, where codes and scales of a row are one tensor.
    `quotient`: "float32", or "weight" if weight / scale is rounded to the weight's dtype before it is quantized.
    `scale_dtype`: float scales are rounded to this dtype, and the weight is divided by the rounded scale.
    `round_up`: those that are subnormal in that dtype are rounded up, since codes saturate (TensorRT).
    `bound`: a scale is amax / bound; 0 takes the largest code; of MX, a power of two.
    `reciprocal`: the scale above NVFP4's blocks is stored as 1 / scale (compressed-tensors), and rounded as such unless
    it is `exact`. `least`: the lower bound of KV scales. `values`: the fake-quantized values are stored in this float
    dtype, like their scales, so that quantizing them again gives the codes (Tripy). `negative`: scales may be negative,
    though other readers of this packing refuse that (ONNX Runtime beside TensorRT).
    """

    cast: str = ""
    packed: str = "in"
    quotient: str = "float32"
    scale_dtype: str = "float32"
    round_up: bool = False
    bound: float = 0.0
    reciprocal: bool = False
    least: float = 0.0
    values: str = ""
    exact: bool = later(False)
    negative: bool = later(False)

    @property
    def signed(self) -> bool:
        """Whether scales may be negative, as AutoRound and MLX write them in words of 32 bits, llama.cpp in Q4_0, and
        ONNX Runtime."""
        return self.negative or self.packed in ("int32", "awq", "uint32", "q4_0")

    @property
    def scale_is(self) -> str:
        """The stored dtype of float scales."""
        return self.values or self.scale_dtype

    @property
    def rounds_up(self) -> str:
        """The dtype whose subnormal scales are rounded up; "" if they are not."""
        return self.values or (self.scale_dtype if self.round_up else "")


@dataclass(frozen=True)
class Slice:
    """A rectangle of one source tensor, in its stored axes; None takes a whole axis.

    `module` is its site, whose pre-scale smooths it. `transposed`: stored [in, out], read as [out, in]. An empty
    `source` is padding with zeros of `rows` and `cols`. `rope`: rows of one head to reorder: > 0 from halves
    (rotate-half) to interleaved pairs, < 0 back. `expert`: the matrix of a tensor with three axes. `step`: every
    `step`-th row is taken, beginning with the first.
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
        """Whether its rows are not consecutive rows of the source."""
        return self.transposed or self.expert is not None or self.step > 1

    @property
    def inner(self) -> tuple[int, int] | None:
        """The part of `in` that it takes, which are its rows if stored as [in, out]."""
        return self.rows if self.transposed else self.cols


@dataclass(frozen=True)
class Site:
    """One quantizable module of an architecture, in checkpoint names.

    `layout` of the stored weight: "out_in" (Linear), "in_out" (Conv1D), "conv" (out, in / groups, kernel...),
    "stack_out_in" or "stack_in_out" (all experts of a layer; `module` is then the name of the tensor). `keep`: why it
    stays unquantized unless a recipe names it ("" if it is quantized). `unreached`: why an input of it cannot be
    measured ("" if it can); formats that need that stay off it unless a recipe names it. `shares`: a group whose
    members share one per-tensor weight amax, because they are one matrix in the model. `asked`: other names under which
    programs ask whether it is quantized. `live`: the names of its module in a model of transformers, if they differ.
    """

    module: str
    weight: str
    layout: str
    roles: tuple[str, ...] = ()
    layer: int | None = None
    expert: int | None = None
    keep: str = ""
    shares: str = ""
    unreached: str = ""
    asked: tuple[str, ...] = ()
    live: tuple[str, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether the tensor has all experts of a layer."""
        return self.layout.startswith("stack")

    @property
    def is_head(self) -> bool:
        """Whether it computes logits; recipes alone quantize it."""
        return self.keep.startswith("output head")

    @property
    def experts(self) -> str:
        """The module with all experts of the site's layer; "" if the site is not an expert."""
        if self.stacked:
            return self.module.rpartition(".")[0]
        return "" if self.expert is None else self.module.rpartition(f".{self.expert}.")[0]


@dataclass(frozen=True)
class InputGroup:
    """Modules that read the same tensor, in the model's order.

    `norm` is the module that outputs that tensor, "" if it is not a norm's; `alone`: only the group reads it, so that a
    pre-scale may be multiplied into the norm; `plus_one`: the norm multiplies by 1 + weight.
    """

    modules: tuple[str, ...]
    norm: str = ""
    alone: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class Feed:
    """Rows of one matrix that are, one by one, the input of another: a factor of that input may multiply the rows.

    `writer`, `reader`: modules. `rows`: of the writer's `out`. `repeat`: how many heads of `width` inputs read the same
    rows (grouped-query attention). `format`: the reader's, in a plan that multiplies its pre-scale into the rows.
    """

    writer: str
    rows: tuple[int, int]
    reader: str
    repeat: int = 1
    width: int = 1
    format: Format | None = None


@dataclass(frozen=True)
class Cut:
    """How ranks that share a layer cut a matrix: along `axis`, "out" or "in", into `count` units of `size`.

    `unit`: what is counted. `repeats`: where units are fewer than ranks, several ranks have the same one.
    """

    axis: str
    unit: str
    count: int
    size: int
    repeats: bool = False

    def share(self, ranks: int) -> int:
        """The extent of one rank's part; 0 if it would cut a unit."""
        if self.repeats and ranks % self.count == 0:
            return self.size
        return 0 if self.count % ranks else self.count // ranks * self.size


@dataclass(frozen=True)
class Structure:
    """An architecture for the plan: from its table, or traced with torch if it has none.

    `attention`: attention modules by layer, where K and V can be quantized. `tied`: alias -> the stored tensor.
    `ignored`: source tensor -> why it is not copied. `roles`: source tensor -> its roles, empty without a table.
    `groups`: modules of `sites` with the same input. `order`: every tensor of the checkpoint (tied aliases too) in the
    order of the model's modules. `embeddings`: modules whose weight is looked up, not multiplied. `ungrouped`: why
    `groups` are unknown, "" if they are known. `traced`: whether torch was needed. `singles`: groups of one module, for
    the norm that it reads. `feeds`: matrices between which nothing but attention or a gate stands. `cuts`: role of a
    matrix that ranks share -> how. These three are empty without a table. `joined`: the weight of a stack of matrices
    that are gate and up of an expert -> "halves" if the rows of gate come first, "pairs" if rows of both alternate.
    `states`: whether layers keep states of fixed size beside keys and values, or instead of them.
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
    singles: tuple[InputGroup, ...] = ()
    feeds: tuple[Feed, ...] = ()
    cuts: dict[str, Cut] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    states: bool = False


@dataclass(frozen=True)
class Program:
    """A program that writes a source's input or loads a target's output.

    `proof`: the evidence, and what was not run. `tests`: its files in the repository. The documentation shows both.
    """

    name: str
    versions: str
    proof: str
    tests: tuple[str, ...]
