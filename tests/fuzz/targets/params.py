"""`params.json` of Meta's checkpoints, against the tensors that the model was made of."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.sources.opening import open_source
from bridge.sources.source import Source
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import jsons
from tests.sources.foreign_checkpoints import llama, meta, spelled

FILE = "params.json"
TURNED = (".q_proj.weight", ".k_proj.weight")  # whose rows stand in another order where there are other heads


def make(root: Path) -> None:
    meta(root, spelled(llama(), "meta"))


def cases(root: Path) -> SearchStrategy[Case]:
    said = json.loads((root / FILE).read_text())
    scaled = said | {
        "use_scaled_rope": True,
        "rope_scaling": {"factor": 8.0},
        "multiple_of": 16,
        "ffn_dim_multiplier": 1.3,
    }
    return st.one_of(jsons(said), jsons(scaled)).map(lambda content: {FILE: content})


def read(root: Path) -> Source:
    source = open_source(root)
    for name in source.specs:
        source.read(name)
    return source


def agree(root: Path, found: Source) -> None:
    said = json.loads((root / FILE).read_bytes())
    assert found.config["hidden_size"] == said.get("dim", 48)
    wanted = llama()
    assert found.specs.keys() <= wanted.keys()
    for name in found.specs:
        if not name.endswith(TURNED):
            assert found.read(name).tobytes() == wanted[name].numpy().tobytes(), name


TARGET = Target("params", make, cases, read, agree, FILE)
