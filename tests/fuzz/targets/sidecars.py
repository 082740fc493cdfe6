"""Calibrations as they are saved, against the safetensors library and `json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors import safe_open
from safetensors.numpy import load_file

from bridge.core.formats.safetensors import file_bytes
from bridge.quant.calibration import Applied, Calibration, HeldOut, Provenance
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, damaged, json_text, pick, trees

FILE = "model.calib"
HELD = (
    "held_out/inputs/0/input_ids",
    "held_out/inputs/1/input_ids",
    "held_out/inputs/x",
    "held_out/inputs/-1/a",
    "held_out/rows",
    "held_out/x",
)
KINDS = (
    "input_amax/x",
    "pre_scale/x",
    "k_amax/x",
    "expert_tokens/x",
    "smoothing_amax/x",
    "input_square/x",
    "nothing/x",
    "input_amax/",
    *HELD,
)
ARRAYS = (
    np.float32(1),
    np.float32(0),
    np.float32(-1),
    np.float32("nan"),
    np.float32("inf"),
    np.ones(3, np.float32),
    np.zeros(3, np.float32),
    np.ones((2, 2), np.float32),
    np.ones(2, np.float64),
    np.ones(2, np.int64),
    np.empty(0, np.float32),
    np.ones((2, 3), np.int32),
)


def make(root: Path) -> None:
    held = HeldOut(
        ({"input_ids": np.arange(4).reshape(1, 4)},),
        np.arange(2),
        np.arange(3),
        np.ones((2, 3), np.float32),
        np.ones((2, 3), np.float32),
        source_perplexity=2.5,
        quantized_perplexity=None,
    )
    Calibration(
        Provenance("fp8", "0" * 64, "LlamaForCausalLM", "text", "float32", "cpu", 4, 8),
        input_amax={"a.b": np.array(2.0, np.float32)},
        pre_scale={"a.b": np.ones(3, np.float32)},
        held_out=held,
    ).save(root / FILE)


@st.composite
def _files(draw: st.DrawFn, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    arrays, metadata = dict(arrays), dict(metadata)
    if draw(st.booleans()):
        said = json_text(draw(trees(json.loads(metadata["qbridge"])))).decode("utf-8", "replace")
        metadata["qbridge"] = said
    if draw(st.booleans()):
        arrays[pick(draw, (*KINDS, *arrays))] = np.asarray(pick(draw, ARRAYS))
    if draw(st.integers(0, 5)) == 0:
        arrays.pop(pick(draw, list(arrays)))
    if draw(st.integers(0, 9)) == 0:
        metadata[pick(draw, list(metadata))] = str(pick(draw, VALUES[:30]))
    return file_bytes(
        {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}, metadata
    )


def cases(root: Path) -> SearchStrategy[Case]:
    with safe_open(root / FILE, "np") as file:
        metadata = dict(sorted(file.metadata().items()))
    data = (root / FILE).read_bytes()
    # sorted: the library's order is another in each process, and a seed would not give the same cases again
    whole = _files(dict(sorted(load_file(root / FILE).items())), metadata)
    return st.one_of(whole, whole, whole, damaged(data, edge=1200)).map(lambda content: {FILE: content})


def read(root: Path) -> Calibration:
    return Calibration.load(root / FILE)


def agree(root: Path, found: Calibration) -> None:
    arrays = {name: array.tobytes() for name, array in load_file(root / FILE).items()}
    assert {name: array.tobytes() for name, array in found._arrays().items()} == arrays
    with safe_open(root / FILE, "np") as file:
        said = json.loads(file.metadata()["qbridge"])
    unsaid = {entry.name: "" for entry in dataclasses.fields(Provenance) if entry.default == ""}
    assert dataclasses.asdict(found.provenance) == {**unsaid, **said["provenance"]}
    assert [dataclasses.asdict(applied) for applied in found.applied] == said["applied"]
    assert all(isinstance(applied, Applied) for applied in found.applied)


TARGET = Target("sidecars", make, cases, read, agree, FILE)
