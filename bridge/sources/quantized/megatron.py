"""ModelOpt's quantizer state in a Megatron checkpoint, as a `Calibration`.

NeMo and Megatron quantize a module of several matrices as one: the statistics of linear_qkv hold for queries, keys and
values, those of linear_fc1 for gate and up. The amax of a weight is computed again from the weight. SmoothQuant and AWQ
store weights divided by the pre-scale of their input: they are read times that. Codes are never read as weights.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.core.dtypes import DTYPES, from_float32, to_float32
from bridge.core.errors import SourceError
from bridge.core.text import listed, named
from bridge.quant.calibration import Calibration, Provenance
from bridge.sources.weights.containers import Container
from bridge.sources.weights.unsupported import LOW_BIT
from bridge.tables.dialects.translate import Native, Translated
from bridge.tables.expressions.regions import Block, Blocks

# W4A8 quantizes a weight twice: weight_quantizer.0, weight_quantizer.1
STATE = re.compile(r"(?P<module>.+)\.(?P<quantizer>\w+_quantizer)(\.\d+)?\.(?P<what>_\w+)")
CODES = ("uint8", "int8", *LOW_BIT)
PIECE = 1 << 18  # values that are multiplied at once: a megabyte as float32
_WEIGHT = re.compile(r"\.weight(_w|_v|\d+)?$")
_CACHE = ("k_bmm_quantizer", "v_bmm_quantizer")
_SCALE = "input_quantizer._pre_quant_scale"
_KNOWN = ("_amax", "_global_amax")  # of a weight's quantizer; any other tensor may mean that the weight was changed


def quantizer_state(names: Iterable[str]) -> dict[str, str]:
    """Return ModelOpt's own tensors, each with its module."""
    return {name: match["module"] for name in names if (match := STATE.fullmatch(name))}


def refuse_changed(where: str, container: Container, state: Mapping[str, str]) -> None:
    """SourceError if the model's own weights cannot be recovered: codes, or changed by more than a pre-scale."""
    specs, scales = container.specs, _scales(container)
    codes = [name for name, spec in specs.items() if name not in state and spec.dtype in CODES and _WEIGHT.search(name)]
    kinds = {name: match for name in state if (match := STATE.fullmatch(name))}
    other = [name for name, kind in kinds.items() if "weight" in kind["quantizer"] and kind["what"] not in _KNOWN]
    alone = [name for name in state if name.endswith(_SCALE) and name not in scales.values()]
    problems = [
        f"{named(names)}: {what}; start from the checkpoint before quantization, and calibrate here"
        for names, what in (
            (codes, "has codes instead of weights, as ModelOpt's `compress` writes them, which is not supported"),
            (other if not codes else [], "ModelOpt's, and may have changed the weight in an unsupported way"),
            (alone, "a pre-scale of ModelOpt's without the weight that was divided by it"),
        )
        if names
    ]
    problems += [
        f"{scale}: has shape {specs[scale].shape}, but {name} takes {specs[name].shape[-1]} inputs"
        for name, scale in scales.items()
        if specs[scale].size not in _sizes(specs[name].shape, specs[name].shape[-1])
    ]
    if problems:
        raise listed(where, problems)


def unsmoothed(where: str, container: Container) -> Container:
    """Return the container with the model's own weights: itself, if ModelOpt smoothed none."""
    scales = _scales(container)
    return Unsmoothed(container, scales, _Vectors(where, container)) if scales else container


def _scales(container: Container) -> dict[str, str]:
    """Weight -> pre-scale of its input; gate and up share one, and so do grouped experts."""
    weights = [name for name in container.specs if _WEIGHT.search(name)]
    scales = {name: f"{_WEIGHT.sub('', name)}.{_SCALE}" for name in weights}
    return {name: scale for name, scale in scales.items() if scale in container.specs}


def _sizes(shape: tuple[int, ...], width: int) -> list[int]:
    """Return the valid counts of numbers, `width` per matrix: leading axes are layers and experts, or some of them."""
    return [width * count for count in itertools.accumulate(shape[:-2], operator.mul, initial=1)]


@dataclass(frozen=True)
class _Vectors:
    """The numbers of quantizers, each tensor read once."""

    where: str
    container: Container
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, name: str, weight: str, width: int) -> np.ndarray:
        """Return `width` numbers for each matrix of a weight, float32 (matrices, width)."""
        spec = self.container.specs[name]
        if spec.size not in _sizes(self.container.specs[weight].shape, width):
            raise SourceError(
                f"{self.where}: {name} has shape {spec.shape}: supported is one number per matrix, not per channel; "
                "give calib="
            )
        if name not in self.values:
            stored = np.empty(spec.size, DTYPES[spec.dtype].storage)
            self.values[name] = to_float32(self.container.read_flat(name, 0, spec.size, stored), spec.dtype)
        return self.values[name].reshape(-1, width)

    def scale(self, name: str, weight: str) -> np.ndarray:
        """Return a pre-scale, float32 (matrices, in); SourceError unless all numbers are finite and positive."""
        scale = self.read(name, weight, self.container.specs[weight].shape[-1])
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise SourceError(f"{self.where}: {name}: holds a number that is not finite and above zero")
        return scale


class Unsmoothed:
    """A container of smoothed weights: each is read times its pre-scale, whole rows at a time.

    The product is rounded once to the weight's dtype, as ModelOpt does it (`disable_pre_quant_scale_and_resmooth`).
    """

    def __init__(self, container: Container, scales: Mapping[str, str], vectors: _Vectors) -> None:
        self._container, self._scales, self._vectors = container, scales, vectors
        self.specs, self.files = container.specs, container.files
        self.objects, self.skipped = container.objects, container.skipped

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        if name not in self._scales:
            return self._container.read_flat(name, begin, end, out)
        if out.flags.c_contiguous:
            self._container.read_flat(name, begin, end, out)
            self._multiply(name, begin, out)
            return out
        for part in out:  # a head in another order cannot be flattened in place: multiply a copy
            own = np.empty(part.shape, part.dtype)
            part[...] = self.read_flat(name, begin, begin + own.size, own)
            begin += own.size
        return out

    def _multiply(self, name: str, begin: int, values: np.ndarray) -> None:
        scale, spec = self._vectors.scale(self._scales[name], name), self.specs[name]
        width = spec.shape[-1]
        height = spec.size // width // len(scale)  # rows of a matrix
        rows, step = values.reshape(-1, width), max(1, PIECE // width)
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            matrix = (begin // width + at + np.arange(len(part))) // height
            part[...] = from_float32(to_float32(part, spec.dtype) * scale[matrix], spec.dtype)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        return self._container.place(name, begin)


@dataclass(frozen=True)
class Statistics:
    """Reads the calibration on request. `tensors`: by Hugging Face's names."""

    where: str
    architecture: str
    container: Container
    native: Mapping[str, Native]
    tensors: Mapping[str, Translated]

    def reasons(self, state: Mapping[str, str]) -> dict[str, str]:
        """Return what is done with each tensor of ModelOpt's."""
        weights = {_WEIGHT.sub("", native.stored) for native in self.native.values()}
        read = {name for tensor in self._matrices().values() for name in self._read_for(tensor.blocks)}

        def why(name: str, module: str) -> str:
            what = name.removeprefix(f"{module}.")
            if module in weights and what == _SCALE:
                return "its weight is read times it"
            if module in weights and what.startswith("weight_quantizer."):
                return "computed anew from the weight"
            return "kept as a calibration, unless it is zero or not finite" if name in read else "not used"

        return {name: f"ModelOpt's: {why(name, module)}" for name, module in state.items()}

    def read(self) -> Calibration:
        """Return the statistics of inputs and of K and V, by modules of Hugging Face's names.

        One that is zero or not finite (an expert that no token reached) is left out; a scheme that needs it calibrates.
        """
        vectors = _Vectors(self.where, self.container)
        input_amax: dict[str, np.ndarray] = {}
        pre_scale: dict[str, np.ndarray] = {}
        cache: dict[str, dict[str, np.ndarray]] = {quantizer: {} for quantizer in _CACHE}
        for module, tensor in self._matrices().items():
            blocks = tensor.blocks
            self._note(input_amax, module, [self._amax(vectors, block, "input_quantizer") for block in blocks])
            scales = [scale for block in blocks if (scale := self._scale(vectors, block)) is not None]
            if len(scales) == len(blocks) and all(np.array_equal(scales[0], scale) for scale in scales):
                pre_scale[module] = scales[0]
            for quantizer, by_module in cache.items() if _of_attention(blocks) else ():
                amaxes = [self._amax(vectors, block, quantizer) for block in blocks]
                self._note(by_module, module.rpartition(".")[0], amaxes)
        dtype = next(iter(self.tensors.values())).spec.dtype
        provenance = Provenance("ModelOpt's in the checkpoint", "", self.architecture, "", dtype, "", 0, 0)
        k_amax, v_amax = cache.values()
        return Calibration(provenance, input_amax, pre_scale=pre_scale, k_amax=k_amax, v_amax=v_amax)

    @staticmethod
    def _note(by_module: dict[str, np.ndarray], module: str, amaxes: list[float | None]) -> None:
        known = [amax for amax in amaxes if amax is not None and math.isfinite(amax) and amax > 0]
        if known and len(known) == len(amaxes):
            by_module[module] = np.array(max(known), np.float32)

    def _matrices(self) -> dict[str, Translated]:
        """Return the matrices of weights by module: their inputs may have statistics."""
        weights = {name: tensor for name, tensor in self.tensors.items() if len(tensor.spec.shape) == 2}
        return {n.removesuffix(".weight"): tensor for n, tensor in weights.items() if n.endswith(".weight")}

    def _read_for(self, blocks: Blocks) -> Iterator[str]:
        """Yield the names of the numbers that `read` looks for."""
        for block in blocks:
            for quantizer in ("input_quantizer", *(_CACHE if _of_attention(blocks) else ())):
                yield self._name(block, quantizer)

    def _name(self, block: Block, quantizer: str) -> str:
        """Return the name of the amax of a quantizer of a weight's module, or of its attention."""
        module = _WEIGHT.sub("", self.native[block.source].stored)
        module = f"{module.rpartition('.')[0]}.core_attention" if quantizer in _CACHE else module
        return f"{module}.{quantizer}._amax"

    def _amax(self, vectors: _Vectors, block: Block, quantizer: str) -> float | None:
        """Read one number of a quantizer, which may be stacked over layers and experts like its weight."""
        name = self._name(block, quantizer)
        if name not in self.container.specs:
            return None
        return float(self._of(block, vectors.read(name, self.native[block.source].stored, 1))[0])

    def _scale(self, vectors: _Vectors, block: Block) -> np.ndarray | None:
        weight = self.native[block.source].stored
        name = f"{_WEIGHT.sub('', weight)}.{_SCALE}"
        return self._of(block, vectors.scale(name, weight)) if name in self.container.specs else None

    def _of(self, block: Block, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of the matrix that a block is part of."""
        weight = self.native[block.source]
        begin = weight.first + block.rows[0] * weight.shape[-1]
        return np.asarray(numbers[begin * len(numbers) // self.container.specs[weight.stored].size])


def _of_attention(blocks: Blocks) -> bool:
    """Whether queries, keys and values are one matrix, whose attention may have statistics of K and V."""
    return all(".linear_qkv." in block.source for block in blocks)
