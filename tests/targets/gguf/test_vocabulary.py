"""Embedding and head in llama-quantize's types (llama-quant.cpp at 007dbbf3), and rows of other widths.

gguf-py quantizes and reads the blocks, llama.cpp computes with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import bridge
from bridge.core.errors import PlanError
from bridge.core.formats.gguf import GgufFile
from bridge.quant.codec import ggml_library
from bridge.targets.gguf.encodings import vocabulary_scheme
from tests.models.gguf_families import save
from tests.oracles.llama_cpp import divergence

WIDE = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUNDED = 2.5e-4  # see test_kquants.py


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {"untied": ("qwen3", {}), "tied": ("qwen2", {}), "wide": ("qwen3", WIDE)}
    return {name: save(family, root / name, **changed) for name, (family, changed) in made.items()}


def written(model: Path, out: Path, quant: str | Path, **options: Any) -> dict[str, str]:
    report = bridge.convert(str(model), "gguf", quant, out, progress=False, **options)
    assert report.passed and not report.findings
    return {name: spec.dtype for name, spec in GgufFile(out / "model.gguf").specs.items()}


@pytest.mark.parametrize(
    ("kind", "width", "embedding", "head"),
    [
        ("q8_0", 640, "q8_0", "q8_0"),
        ("q4_0", 640, "q4_0", "q8_0"),  # Q6_K does not fit, and becomes Q8_0
        ("q4_0", 768, "q4_0", "q6_k"),
        ("q4_k", 768, "q4_k", "q6_k"),
        ("q5_k", 768, "q5_k", "q6_k"),
        ("q4_k", 640, "q8_0", "q8_0"),  # llama-quantize: Q5_0 of an embedding beside a head
        ("mxfp4", 768, "q8_0", "q8_0"),
        ("nvfp4", 768, "q6_k", "q6_k"),
        ("q8_0", 100, "", ""),
    ],
)
def test_types_are_those_of_llama_quantize(kind: str, width: int, embedding: str, head: str) -> None:
    assert [vocabulary_scheme(kind, width, of_head) for of_head in (False, True)] == [embedding, head]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "quant", "embedding", "head"),
    [
        ("untied", "q8_0", "q8_0", "q8_0"),
        ("untied", "q4_0", "q4_0", "q8_0"),
        ("tied", "q8_0", "q8_0", ""),
        ("tied", "q4_0", "q8_0", ""),
        ("wide", "q4_k", "q4_k", "q6_k"),
    ],
)
def test_gguf_py_has_the_same_blocks_and_llama_cpp_the_same_logits(
    model: str, quant: str, embedding: str, head: str, models: dict[str, Path], tmp_path: Path
) -> None:
    source, out = models[model], tmp_path / "out"
    kinds = written(source, out, quant, vocabulary="quantize")
    assert (kinds["token_embd.weight"], kinds.get("output.weight", "")) == (embedding, head)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    weights = load_file(source / "model.safetensors")
    for name, of in ("token_embd.weight", EMBEDDING), ("output.weight", HEAD):
        if name not in stored or stored[name].tensor_type.name.endswith("K"):  # which gguf-py reads, and does not make
            continue
        theirs = gguf.quants.quantize(weights[of], stored[name].tensor_type)
        assert np.array_equal(stored[name].data, theirs)
    assert divergence(source, out, tmp_path) <= ROUNDED


@pytest.mark.slow
def test_by_default_they_stay_as_they_are(models: dict[str, Path], tmp_path: Path) -> None:
    kinds = written(models["untied"], tmp_path / "out", "q8_0")
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "float32"


@pytest.mark.slow
def test_a_recipe_s_rule_about_the_head_holds(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('base = "q8_0"\n[[rule]]\nroles = ["head.weight"]\nquant = "none"\n')
    kinds = written(models["untied"], tmp_path / "out", recipe, vocabulary="quantize")
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("q8_0", "float32")


@pytest.mark.slow
def test_rows_that_k_quants_do_not_divide_become_q8_0_beside_others(models: dict[str, Path], tmp_path: Path) -> None:
    """Rows of 256 take Q4_K, those of 320 in the MLP do not."""
    report = bridge.convert(str(models["wide"]), "gguf", "q4_k", tmp_path / "out", progress=False)
    kinds = {name: spec.dtype for name, spec in GgufFile(tmp_path / "out" / "model.gguf").specs.items()}
    assert report.passed and "3 matrices with rows of 320 become Q8_0: Q4_K has blocks of 256" in report.notes
    assert {kind for name, kind in kinds.items() if "ffn_down" in name} == {"q8_0"}
    assert {kind for name, kind in kinds.items() if "ffn_up" in name or "attn_q.weight" in name} == {"q4_k"}
    down = next(
        t for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors if t.name == "blk.1.ffn_down.weight"
    )
    weight = load_file(models["wide"] / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(down.data, gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0))
    assert divergence(models["wide"], tmp_path / "out", tmp_path) <= ROUNDED


def test_what_it_cannot_follow_is_refused_in_words(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(quant: str | None, vocabulary: str) -> object:
        return bridge.plan(str(models["untied"]), "gguf", quant, vocabulary=vocabulary)

    with pytest.raises(PlanError, match=r"vocabulary='q6' .--vocabulary q6.: use keep or quantize"):
        plan("q8_0", "q6")
    with pytest.raises(PlanError, match="none was asked for; give quant"):
        plan(None, "quantize")
    monkeypatch.setattr(ggml_library, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install .*\[gguf\]"):
        plan("q8_0", "quantize")
