"""`model.safetensors.index.json` over two shards, against `json` and the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.numpy import load_file

from bridge.core.formats.safetensors import file_bytes
from bridge.core.text import listed
from bridge.sources.weights.shards import Weights, find_weights
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, jsons, one_file

FILE = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = (
    "model-00003-of-00002.safetensors",
    "../model.safetensors",
    "other.bin",
    "config.json",
    "model.safetensors",
    ".",
)


def make(root: Path) -> None:
    held = [{"a": np.arange(4.0), "layers.0.b": np.ones((2, 3))}, {"layers.1.b": np.zeros((2, 3)), "c": np.arange(3)}]
    for name, arrays in zip(SHARDS, held, strict=True):
        (root / name).write_bytes(file_bytes(arrays))
    (root / "other.bin").write_bytes(b"other")
    weight_map = {tensor: name for name, arrays in zip(SHARDS, held, strict=True) for tensor in arrays}
    (root / FILE).write_text(json.dumps({"metadata": {"total_size": 152}, "weight_map": weight_map}))


def cases(root: Path) -> SearchStrategy[Case]:
    tree = json.loads((root / FILE).read_text())
    near = jsons(tree, (*SHARDS, *SHARDS, *OTHERS, *tree["weight_map"]))
    return st.one_of(near, jsons(tree, (*VALUES, *SHARDS))).map(one_file(FILE))


def read(root: Path) -> Weights:
    found = find_weights(root)
    assert found is not None
    if found.problems:
        raise listed(str(root), found.problems)
    return found


def agree(root: Path, found: Weights) -> None:
    promised = json.loads((root / FILE).read_bytes())["weight_map"]
    assert set(promised) == set(found.specs)
    for file in set(promised.values()):
        arrays = load_file(root / file)
        assert {name for name, where in promised.items() if where == file} == set(arrays)
        for name, array in arrays.items():
            assert found.holder[name].read(name).tobytes() == array.tobytes()


TARGET = Target("indices", make, cases, read, agree, FILE)
