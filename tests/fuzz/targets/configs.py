"""config.json of a small Llama: opened, its structure found, its conversion planned; nothing loops over its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors import safe_open

from bridge.api.plans import plan_of
from bridge.core.errors import UsageError
from bridge.core.formats.safetensors import file_bytes
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import architecture_of
from bridge.tables.architectures.structure import structure
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, jsons, one_file
from tests.models.sources_made import CONFIG, made_llama

FILE = "config.json"
WEIGHTS = "model.safetensors"
ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
)


def make(root: Path) -> None:
    (root / WEIGHTS).write_bytes(file_bytes(made_llama().arrays))
    (root / FILE).write_text(json.dumps(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}))


def cases(root: Path) -> SearchStrategy[Case]:
    tree = json.loads((root / FILE).read_text())
    named = [[name] for name in ARCHITECTURES]
    return st.one_of(jsons(tree), jsons(tree, (*VALUES, *named, *named))).map(one_file(FILE))


def read(root: Path) -> tuple[Source, Any]:
    source = open_source(root)
    if load_arch(architecture_of(source.config)) is None:  # tracing an unknown one is transformers' business
        raise UsageError(f"{root}: no table lists {architecture_of(source.config)[:80]}")
    return source, plan_of(source, structure(source.config, source.specs), "hf", None, {})


def agree(root: Path, found: tuple[Source, Any]) -> None:
    source, plan = found
    assert repr(source.config) == repr(json.loads((root / FILE).read_bytes()))
    written = {output.spec.name: output.spec.shape for step in plan.steps for output in step.outputs}
    tied = structure(source.config, source.specs).tied
    written |= {name: source.specs[name].shape for name in tied if name in source.specs}
    with safe_open(root / WEIGHTS, "np") as library:
        assert written == {name: tuple(library.get_slice(name).get_shape()) for name in library.keys()}  # noqa: SIM118


TARGET = Target("configs", make, cases, read, agree, FILE)
