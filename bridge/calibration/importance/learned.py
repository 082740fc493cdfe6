"""Learn INT4 codes and scales layer by layer by SignRound.

It begins at the codes of GPTQ.

A layer is given what the quantized layers before it put out, and learns to put out what the unquantized one has there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bridge.calibration.algorithms.codes import packed_nibbles, stored_axes
from bridge.calibration.importance.columns import Coded, ColumnCodes
from bridge.calibration.importance.signround import Call, LearnedMatrix, learn
from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.reference_outputs import unpadded
from bridge.calibration.statistics import CODES, SCALES, WATCHED, Statistics
from bridge.calibration.walk.forwards import Batch
from bridge.core.errors import CalibrationError
from bridge.tracker.tensors import tensors_in

SUMS, TOKENS, LOSS = "sums", "tokens", "loss"  # what is kept of a block, before a name


class LearnedCodes(ColumnCodes):
    """The input squares of all bindings; codes, and factors of scales, that each block learned."""

    learns = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        options = dict(self._scheme.options)
        self._steps, self._rate = int(options["steps"]), options["rate"]
        self._coded_here: dict[str, tuple[Sequence[QuantizerBinding], Sequence[Coded]]] = {}

    def _take(self, name: str, weight: str, own: Sequence[QuantizerBinding], coded: Sequence[Coded]) -> None:
        self._coded_here[weight] = own, coded

    def learn(self, block: Any, name: str, outputs: Sequence[Any], calls: Sequence[Batch]) -> Statistics:
        """Replace the weights of a block that `run` saw; return codes, factors, losses, and the sums of its inputs."""
        if len(outputs) != len(calls):
            raise CalibrationError(
                f"{name}: runs for {len(outputs)} batches of the unquantized model and for {len(calls)} of the "
                "quantized one, so that SignRound cannot compare them; use int4:gptq"
            )
        matrices: dict[str, LearnedMatrix] = {}
        for own, coded in self._coded_here.values():
            for one in coded:
                matrices.setdefault(one.parameter.removeprefix(f"{name}."), self._matrix(own, one))
        found: Statistics = {CODES: {}, SCALES: {}, "scale_factor": {}, "expert_tokens": dict(self.tokens), WATCHED: {}}
        if matrices and any(block.children()):  # GPTQ has the least error of a single matrix
            given = [_call(batch, output) for batch, output in zip(calls, outputs, strict=True)]
            loss = learn(block, matrices, given, self._steps, self._rate, zlib.crc32(name.encode()))
            found[WATCHED][f"{LOSS} {name}"] = np.asarray(loss, np.float32)
        for parameter, matrix in matrices.items():
            live = block.get_parameter(parameter)
            live.data = matrix.values(live.dtype)
        for weight, (own, coded) in self._coded_here.items():
            module = own[0].site.module
            learned = [matrices[one.parameter.removeprefix(f"{name}.")] for one in coded]
            found[CODES][module], found["scale_factor"][module] = self._stored(weight, own, learned)
        self._coded_here.clear()
        return self._with_sums(found, name)

    def _matrix(self, own: Sequence[QuantizerBinding], coded: Coded) -> LearnedMatrix:
        turned = own[0].site.layout == "in_out"
        return LearnedMatrix(coded.weight, coded.scales, coded.codes, own[0].format.weight[0], turned)

    def _stored(
        self, weight: str, own: Sequence[QuantizerBinding], learned: Sequence[LearnedMatrix]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Codes, two to a byte, and factors (out, blocks) of a weight, in its axes."""
        origin, turned = self._origins[weight], own[0].site.layout == "in_out"
        codes = [one.codes().to(torch.int8).cpu().numpy() for one in learned]
        wide = stored_axes([one.wide(one.factor).cpu().numpy() for one in learned], origin, turned)
        factors = (wide.T if turned else wide)[:, :: own[0].format.weight[0].block[0]]
        return packed_nibbles(stored_axes(codes, origin, turned)), np.ascontiguousarray(factors)

    def _with_sums(self, found: Statistics, name: str) -> Statistics:
        for (module, parameter, expert), sums in self._sums.items():
            if module == name or module.startswith(f"{name}."):
                key = f"{module} {parameter} {expert}"
                found[WATCHED][f"{SUMS} {key}"] = sums
                found[WATCHED][f"{TOKENS} {key}"] = np.asarray(self._tokens[module, parameter, expert], np.float64)
        return found

    def end(self, seen: Statistics) -> None:
        """Take what was kept of all blocks, by an earlier run as well."""
        self.codes, self.factors = dict(seen[CODES]), dict(seen["scale_factor"])
        self.tokens = dict(seen["expert_tokens"])
        for name, array in seen[WATCHED].items():
            kind, _, rest = name.partition(" ")
            if kind == LOSS:
                self.losses[rest] = array
                continue
            module, parameter, expert = rest.split(" ")
            key = (module, parameter, int(expert))
            if kind == SUMS:
                self._sums[key] = array
            else:
                self._tokens[key] = int(array)


def _call(batch: Batch, output: Any) -> Call:
    first = tensors_in(output)[0]
    ids = batch.inputs.get("input_ids", next(iter(batch.inputs.values())))
    rows = unpadded(first, batch.inputs).to(first.device)
    return Call(batch.forward.args, batch.forward.kwargs, first, rows, len(ids))
