"""Embedding and head in codes: ONNX Runtime computes what the decoded weights compute in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import PlanError
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.quant.codec.decode import decode
from bridge.streaming.written import OutputReader
from bridge.targets.manifest import load_manifest
from bridge.targets.onnx.run.runtime import Runtime
from tests.models.gguf_families import save
from tests.targets.trt.test_genai import assert_equal

SIZE = {"vocab_size": 300, "num_hidden_layers": 2}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": save("qwen2", root / "tied", **SIZE),
        "untied": save("llama", root / "untied", **SIZE, attention_bias=False, mlp_bias=False),
    }


def _kinds(out: Path) -> list[str]:
    graph = onnx.load(out / "model.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node if node.op_type in ("GatherBlockQuantized", "MatMulNBits")]


def _logits_of_decoded(source: Path, out: Path, ids: np.ndarray) -> np.ndarray:
    """Of transformers' model with the decoded codes of the file in place of its weights."""
    plan = load_manifest(out).plan
    reader, weights = OutputReader(plan, out), load_file(source / "model.safetensors")
    for step in plan.quantized:
        arrays = {"codes": reader.read(step.outputs[0]), "scale": reader.read(step.outputs[1])}
        names = [part.source for part in step.inputs]
        rows = [len(weights[name]) for name in names]
        shape = (sum(rows), weights[names[0]].shape[1])
        assert step.format
        values = decode(arrays, step.format.weight, shape, transpose=step.transpose, coding=step.coding)
        parts = torch.from_numpy(values).split(rows)
        weights |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    made = out.parent / "decoded"
    transformers.AutoConfig.from_pretrained(source).save_pretrained(made)
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(ids)).logits.numpy()
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("model", "quant"), [("tied", "int4_wo"), ("tied", "int8_wo"), ("untied", "int4_wo")])
def test_onnx_runtime_looks_rows_up_in_codes(model: str, quant: str, models: dict[str, Path], tmp_path: Path) -> None:
    source, out = models[model], tmp_path / "out"
    report = bridge.convert(str(source), "ort", quant, out, vocabulary="quantize", exact=True, progress=False)
    assert report.passed and not report.findings
    tied = model == "tied"
    assert _kinds(out) == ["GatherBlockQuantized", *(["MatMulNBits"] if tied else [])]
    stored = load_file(out / "model.safetensors")
    assert stored[EMBEDDING].dtype == torch.uint8 and (HEAD in stored) != tied
    ids = np.random.default_rng(0).integers(3, 300, (2, 17))
    ours = Runtime(out).run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"]
    theirs = _logits_of_decoded(source, out, ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()  # float32 sums in another order
    assert_equal(out, Runtime(out), ids)  # onnxruntime-genai
    plan = load_manifest(out).plan
    assert {verdict(load_runtime(name), plan).how for name in ("onnxruntime", "genai")} == {"run"}


@pytest.mark.slow
def test_a_rule_about_the_head_gives_the_shared_codes_their_bits(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('base = "int4_wo"\n[[rule]]\nroles = ["head.weight"]\nquant = "int8_wo"\n')
    plan = bridge.plan(str(models["tied"]), "ort", recipe, vocabulary="quantize")
    (step,) = [step for step in plan.quantized if step.source == EMBEDDING]
    assert step.format and step.format.weight[0].dtype == "int8"
    assert step.outputs[0].spec.shape == (300, 192)


def test_bad_choices_are_refused_in_words(models: dict[str, Path]) -> None:
    def plan(**given: Any) -> object:
        return bridge.plan(str(models["tied"]), "ort", **given)

    with pytest.raises(PlanError, match=r"vocabulary='q6' .--vocabulary q6.: use keep or quantize"):
        plan(quant="int4_wo", vocabulary="q6")
    with pytest.raises(PlanError, match="takes the bits of a scheme; give quant"):
        plan(vocabulary="quantize")
