"""What one step writes: every scale of a weight, at its place."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.core.arrays import Buffers
from bridge.core.output.directory import Work
from bridge.core.values import TensorSpec
from bridge.planning.plan import Output
from bridge.quant.schemes.load import load_scheme
from bridge.streaming import encode
from bridge.streaming.context import ConversionContext
from bridge.targets import file_settings
from tests.models.sources_made import made_llama

SCALE = Output(TensorSpec("weight_scale", (9,), "float32"), "scale", "weight")


def test_scales_of_many_pieces_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "SCALES_AT_ONCE", 16)
    writes: list[tuple[int, list[float]]] = []
    writer = encode.ScaleWriter({"scale": SCALE}, lambda output, array, at: writes.append((at, array.tolist())))
    piece = np.empty((3, 1), np.float32)  # which each piece uses again
    for first in (0, 3, 6):
        piece[:] = [[first], [first + 1], [first + 2]]
        writer.add({"scale": piece})
    writer.write()
    assert writes == [(0, [0, 1, 2, 3, 4, 5]), (24, [6, 7, 8])]


def test_scales_without_an_output_are_not_dropped() -> None:
    source = made_llama("bfloat16")
    plan, scheme = bridge.plan(source, "hf", "int4_wo"), load_scheme("int4_wo")
    work = Work(Path(), {}, io.StringIO())
    context = ConversionContext(plan, source, None, scheme, 1, work, file_settings(plan, source))
    step = plan.quantized[0]
    without = replace(step, outputs=tuple(output for output in step.outputs if output.part != "scale"))
    with pytest.raises(KeyError, match="scale"):
        encode.write_step(without, context, Buffers(), None, lambda output, array, at: None)
