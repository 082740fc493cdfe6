"""What ModelOpt's quantizers left in a Megatron checkpoint, as a `Calibration`; never takes a weight that they changed.

NeMo and Megatron quantize a module of several matrices as one: what was seen before linear_qkv stands for queries, keys
and values, what before linear_fc1 for gate and up. Weights are stored as they were; their own amax is that of the
weights, which is computed anew.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.dtypes import DTYPES, to_float32
from bridge.errors import SourceError
from bridge.quant.calibration import Calibration, Provenance
from bridge.sources.native import Container
from bridge.sources.refuse import LOW_BIT
from bridge.sources.shards import listed, named
from bridge.tables.rectangles import Block
from bridge.tables.spelled import Native, Spelled

STATE = re.compile(r"(?P<module>.+)\.(?P<quantizer>\w+_quantizer)\.(?P<what>_\w+)")
CODES = ("uint8", "int8", *LOW_BIT)
_WEIGHT = re.compile(r"\.weight(_w|_v|\d+)?$")
_CACHE = {"k_bmm_quantizer": "k_amax", "v_bmm_quantizer": "v_amax"}


def quantizer_state(names: Iterable[str]) -> dict[str, str]:
    """Return the tensors that are ModelOpt's, none of the model's, with what becomes of them."""
    why = {"input_quantizer": "kept as a calibration", "weight_quantizer": "computed anew from the weight"}
    why |= dict.fromkeys(_CACHE, "kept as a calibration")
    found = {name: match["quantizer"] for name in names if (match := STATE.fullmatch(name))}
    return {name: f"ModelOpt's: {why.get(quantizer, 'not used')}" for name, quantizer in found.items()}


def refuse_changed(where: str, container: Container, state: Mapping[str, str]) -> None:
    """SourceError where weights are not those of the model any more: smoothed for a pre-scale, or codes."""
    scaled = [name for name in state if name.endswith("._pre_quant_scale")]
    codes = [n for n, spec in container.specs.items() if n not in state and spec.dtype in CODES and _WEIGHT.search(n)]
    problems = []
    if scaled:
        problems.append(
            f"{named(scaled)}: ModelOpt divided these modules' weights by the scales (SmoothQuant, AWQ), which is not "
            "read; start from the checkpoint before quantization, and calibrate here"
        )
    if codes:
        problems.append(
            f"{named(codes)}: holds codes in the place of weights, as ModelOpt's `compress` leaves them, which are not "
            "read; start from the checkpoint before quantization"
        )
    if problems:
        raise listed(where, problems)


@dataclass(frozen=True)
class Statistics:
    """Reads the calibration when it is asked for. `tensors`: by Hugging Face's names."""

    where: str
    architecture: str
    container: Container
    native: Mapping[str, Native]
    tensors: Mapping[str, Spelled]
    values: dict[str, np.ndarray] = field(default_factory=dict)  # by name, each read once

    def read(self) -> Calibration:
        """Return the statistics of inputs and of K and V, by modules of Hugging Face's names.

        One that is zero or not finite (an expert that no token reached) is left out: what needs it calibrates anew.
        """
        found: dict[str, dict[str, np.ndarray]] = {"input_amax": {}, "k_amax": {}, "v_amax": {}}
        for name, tensor in self.tensors.items():
            if not name.endswith(".weight") or len(tensor.spec.shape) != 2:
                continue
            module = name.removesuffix(".weight")
            self._note(found["input_amax"], module, [self._amax(block, "input_quantizer") for block in tensor.blocks])
            for quantizer, kind in _CACHE.items():
                if all(".linear_qkv." in block.source for block in tensor.blocks):
                    amaxes = [self._amax(block, quantizer, "core_attention") for block in tensor.blocks]
                    self._note(found[kind], module.rpartition(".")[0], amaxes)
        dtype = next(iter(self.tensors.values())).spec.dtype
        provenance = Provenance("ModelOpt's in the checkpoint", "", self.architecture, "", dtype, "", 0, 0)
        return Calibration(provenance, found["input_amax"], k_amax=found["k_amax"], v_amax=found["v_amax"])

    @staticmethod
    def _note(found: dict[str, np.ndarray], module: str, amaxes: list[float | None]) -> None:
        known = [amax for amax in amaxes if amax is not None and math.isfinite(amax) and amax > 0]
        if known and len(known) == len(amaxes):
            found[module] = np.array(max(known), np.float32)

    def _amax(self, block: Block, quantizer: str, beside: str = "") -> float | None:
        """Read one number of a quantizer: it may count layers and experts, as the weight it stands before does."""
        weight = self.native[block.source]
        module = _WEIGHT.sub("", weight.stored)
        module = f"{module.rpartition('.')[0]}.{beside}" if beside else module
        name = f"{module}.{quantizer}._amax"
        if name not in self.container.specs:
            return None
        spec, whole = self.container.specs[name], self.container.specs[weight.stored]
        if spec.size not in itertools.accumulate(whole.shape[:-2], operator.mul, initial=1):
            raise SourceError(
                f"{self.where}: {name} has shape {spec.shape}: one number for a matrix is read, not one for a channel; "
                "give calib="
            )
        if name not in self.values:
            stored = np.empty(spec.size, DTYPES[spec.dtype].storage)
            self.values[name] = to_float32(self.container.read_flat(name, 0, spec.size, stored), spec.dtype)
        begin = weight.first + block.rows[0] * weight.shape[-1]
        return float(self.values[name][begin * spec.size // whole.size])
