"""What of a config decides on the key of a kept graph, and what changes no graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from bridge.tables.architectures.meaning import shared
from bridge.targets.onnx.export.float_graph import plain_bytes, to_bytes
from bridge.targets.onnx.export.request import GraphRequest
from tests.models.graphs import export_once
from tests.targets.onnx.export.architectures import DECODERS, llama

REQUEST = GraphRequest(
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "rope_theta": 1e4},
    "causal-lm", "float32", 21, True, True, ("lm_head.weight", "model.norm.weight"), {},
)  # fmt: skip
CHANGES: dict[str, Callable[[GraphRequest], GraphRequest]] = {
    "task": lambda r: replace(r, task="feature-extraction"),
    "dtype": lambda r: replace(r, dtype="float16"),
    "opset": lambda r: replace(r, opset=23),
    "cache": lambda r: replace(r, cache=False),
    "stamp": lambda r: replace(r, stamp=False),
    "tensors": lambda r: replace(r, tensors=r.tensors[1:]),
    "tied": lambda r: replace(r, tied={"lm_head.weight": "model.embed_tokens.weight"}),
    "config": lambda r: replace(r, config={**r.config, "rope_theta": 1e5}),
    "a new entry": lambda r: replace(r, config={**r.config, "sliding_window": 7}),
    "attention": lambda r: replace(r, config={**r.config, "_attn_implementation": "eager"}),
    "architecture": lambda r: replace(r, config={**r.config, "architectures": ["MistralForCausalLM"]}),
    "a nested entry": lambda r: replace(r, config={**r.config, "rope_parameters": {"factor": 2.0}}),
    "whether transformers wrote it": lambda r: replace(r, config={**r.config, "transformers_version": "5.23.0"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_of_a_request_decides_on_its_key(change: str) -> None:
    assert CHANGES[change](REQUEST).key != REQUEST.key


ORIGIN = {
    "_name_or_path": "a", "transformers_version": "4.1", "torch_dtype": "float16", "dtype": "bfloat16",
    "tokenizer_class": "LlamaTokenizer", "unsloth_version": "2026.1", "unsloth_fixed": True,
    "_attn_implementation_autoset": True, "transformers.js_config": {"dtype": "q4"},
}  # fmt: skip


def test_where_a_config_came_from_changes_no_key() -> None:
    assert ORIGIN.keys() == {*shared().section("without_effect")["saved"], "transformers_version"}
    wrote = {"transformers_version": "4.0"}
    configs = [{**REQUEST.config, **wrote}, {**REQUEST.config, **ORIGIN}]
    assert len({replace(REQUEST, config=config).key for config in configs}) == 1


@pytest.mark.product
def test_where_a_config_came_from_changes_no_graph() -> None:
    fields = json.loads(llama(num_hidden_layers=3).to_json_string(use_diff=False))
    graphs = [to_bytes(export_once(config), {}) for config in (llama(num_hidden_layers=3), {**fields, **ORIGIN})]
    assert graphs[0] == graphs[1]


TUNED = {
    "attention_dropout": 0.1, "gradient_checkpointing": True, "hidden_dropout": 0.1, "initializer_range": 0.5,
    "bos_token_id": 4, "eos_token_id": [5, 6], "use_cache": False,
}  # fmt: skip


@pytest.mark.product
@pytest.mark.parametrize("family", DECODERS)
def test_what_fine_tunes_differ_in_changes_no_operator(family: str) -> None:
    fields = json.loads(DECODERS[family]().to_json_string(use_diff=False))
    config = {**fields, **{name: value for name, value in TUNED.items() if name in fields}}
    one, other = (export_once(given, task="causal-lm") for given in (fields, config))
    assert plain_bytes(replace(one, text={}), {}) == plain_bytes(replace(other, text={}), {})
