"""Decoders whose caches are buffers: against transformers in ONNX Runtime, and as TensorRT for RTX compiles them."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

import bridge
from bridge.core.errors import CannotRun, ExportError, PlanError, UsageError
from bridge.quant.calibration import HeldOut
from bridge.targets.onnx.lint import lint
from bridge.targets.onnx.run import buffers
from bridge.targets.onnx.run.runtime import Runtime, past_of
from bridge.targets.trt.engine import run_builder
from bridge.targets.trt.profile import Profile
from bridge.verification.outputs import of_first_tokens
from tests import once
from tests.models.trt_families import VOCAB, decoder, encoder
from tests.targets.trt.test_rtx import needs_rtx
from tests.targets.trt.test_rtx import written as written_for_rtx
from tests.targets.trt.written import MODEL

LENGTH = 24  # of the buffers
PROMPT, STEPS = 11, 5  # longer than the windows of 7 tokens
slow = pytest.mark.slow
FAMILIES = [
    "llama",
    "mistral",
    "gemma3",
    *(pytest.param(name, marks=slow) for name in ("qwen3", "phi3", "mixtral", "gpt2")),
]


def graph_of(family: str) -> Runtime:
    def make(directory: Path) -> None:
        bridge.convert(decoder(family), "trt", "none", directory / "out", cache=LENGTH, verify=False, progress=False)

    return Runtime(once.directory(f"buffers-{family}", make) / "out")


def transformers_logits(family: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits of all tokens in one pass without a cache."""
    places = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    given = {"attention_mask": torch.tensor(mask), "position_ids": places, "use_cache": False}
    with torch.no_grad():
        return np.asarray(decoder(family)(input_ids=torch.tensor(ids), **given).logits)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() < 1e-4 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_tokens_after_it_have_transformers_logits(family: str) -> None:
    """The second row is padded on the left, and what lies in the buffers before is never read."""
    graph = graph_of(family)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, PROMPT + STEPS))
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    want = transformers_logits(family, ids, mask)
    past = {
        name: np.full((2, *entry.shape[1:]), 9, np.float32)
        for name, entry in graph.inputs.items()
        if name.startswith("past_key_values.")
    }
    for first, last in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))):
        feeds = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last], **past}
        out = graph.run({**feeds, "write_indices": np.full(2, first)})
        assert out["present.0.key"].shape[2] == LENGTH
        real = mask[:, first:last] == 1
        assert_close(out["logits"][real], want[:, first:last][real])
        past = past_of(out)


def test_rows_that_are_padded_on_the_right_go_on_at_their_own_places() -> None:
    """A row's next token takes the place of its padding, and its logits are those of the row alone."""
    graph = graph_of("llama")
    ids, lengths = np.random.default_rng(1).integers(3, VOCAB, (2, 8)), np.array([8, 5])
    out = graph.run({"input_ids": ids, "attention_mask": (np.arange(8) < lengths[:, None]).astype(np.int64)})
    new = np.random.default_rng(2).integers(3, VOCAB, (2, 1))
    mask = (np.arange(LENGTH) <= lengths[:, None]).astype(np.int64)
    step = graph.run({"input_ids": new, "attention_mask": mask, "write_indices": lengths, **past_of(out)})
    for row, length in enumerate(lengths):
        alone = np.concatenate([ids[row, :length], new[row]])[None]
        assert_close(step["logits"][row, -1], transformers_logits("llama", alone, np.ones_like(alone))[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kv"), [("int8_wo", None), ("fp8", None), ("fp8", "fp8"), ("int8", "int8")])
def test_verify_reads_quantized_graphs_in_steps(scheme: str, kv: str | None, tmp_path: Path) -> None:
    data: dict[str, Any] = {"samples": 4, "sequence": 64, "kv": kv, "progress": False}
    report = bridge.convert(MODEL, "trt", scheme, tmp_path / "out", cache=128, **data)
    assert report.passed and any("no genai_config.json" in note for note in report.notes)
    assert not lint(tmp_path / "out") and not (tmp_path / "out" / "genai_config.json").exists()
    bridge.convert(MODEL, "trt", scheme, tmp_path / "grown", verify=False, **data)
    prompt = np.arange(5, 25)[None]
    tokens = [Runtime(tmp_path / name).generate(prompt, max_new_tokens=12) for name in ("out", "grown")]
    assert (tokens[0] == tokens[1]).all()


@pytest.mark.slow
def test_verify_finds_tokens_at_wrong_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bridge.convert(MODEL, "trt", "none", tmp_path / "out", cache=256, progress=False).passed
    fill = buffers.fill_buffers

    def at_the_begin(feeds: dict[str, np.ndarray], length: int) -> None:
        fill(feeds, length)
        feeds["write_indices"] = np.zeros(len(feeds["input_ids"]), np.int64)

    monkeypatch.setattr(buffers, "fill_buffers", at_the_begin)
    assert not bridge.verify(tmp_path / "out", MODEL, progress=False).passed


@pytest.mark.slow
def test_the_last_token_alone_and_a_full_buffer(tmp_path: Path) -> None:
    bridge.convert(MODEL, "trt", "int8_wo", tmp_path / "out", cache=16, logits="last", verify=False, progress=False)
    shape = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.output[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim][1] == 1
    made = bridge.run(tmp_path / "out", "The value of the expression is", tokens=64)
    assert (
        made.prompt_tokens + len(made.ids) == 16
        and made.end == "buffer"
        and "the buffers of keys and values are full" in str(made)
    )
    with pytest.raises(CannotRun, match="the text has 17 tokens, and the buffers of the graph hold 16"):
        Runtime(tmp_path / "out").run({"input_ids": np.ones((1, 17), np.int64)})


@pytest.mark.slow
def test_a_text_is_cut_to_the_buffers_before_outputs_are_compared(tmp_path: Path) -> None:
    """The answers that calibration kept are those of 64 tokens; verify of an unquantized model makes its own."""
    report = bridge.convert(MODEL, "trt", "fp8", tmp_path / "out", cache=32, samples=4, sequence=64, progress=False)
    assert report.passed and [output.reference for output in report.parity.outputs] == ["source", "modelopt"]
    plain = bridge.convert(MODEL, "trt", "none", tmp_path / "plain", cache=32, samples=4, sequence=64, progress=False)
    (output,) = plain.parity.outputs
    assert plain.passed and output.perplexity == pytest.approx(output.reference_perplexity, rel=1e-4)


def test_references_of_first_tokens_are_those_of_their_positions() -> None:
    ids = np.arange(24).reshape(2, 12)
    rows = np.array([0, 3, 5, 12, 16, 23])
    held = HeldOut(
        ({"input_ids": ids, "other": np.ones((2, 5))},), rows, np.arange(1), rows[:, None], rows[:, None], 2.0
    )
    cut = of_first_tokens(held, 4)
    assert cut.inputs[0]["input_ids"].tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]] and cut.inputs[0]["other"].shape == (
        2,
        5,
    )
    assert cut.inputs[0]["input_ids"].reshape(-1)[cut.rows].tolist() == [0, 3, 12] == cut.source[:, 0].tolist()
    assert cut.source_perplexity is None and of_first_tokens(held, 12) is held
    with pytest.raises(CannotRun, match="all positions to compare lie after the first 2 tokens"):
        of_first_tokens(replace(held, rows=rows[2:3]), 2)


def test_buffers_longer_than_the_model_s_positions_are_told_in_the_plan() -> None:
    notes = bridge.plan(MODEL, "trt", cache=1000).notes
    assert any("the model has 512 positions" in note and "cache=512 (--cache 512)" in note for note in notes)
    assert not any("positions" in note for note in bridge.plan(MODEL, "trt", cache=512).notes)


def test_models_and_words_that_buffers_are_not_for_are_refused() -> None:
    bad: Any
    for bad in (1, 0, -5, 2.5, "yes", "buffer", None):
        with pytest.raises(UsageError, match=r"cache=.* must be True, False, or the tokens of a buffer"):
            bridge.plan(MODEL, "trt", cache=bad)
    with pytest.raises(UsageError, match="opset 23 is not possible: older ones have no TensorScatter"):
        bridge.plan(MODEL, "trt", cache=64, opset=23)
    with pytest.raises(UsageError, match=r"cache=64 \(--cache 64\) is for decoders of one graph, not for task"):
        bridge.plan(encoder("bert"), "trt", cache=64)
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    plan = bridge.plan(transformers.LlamaForCausalLM(config), "trt", cache="64")
    assert (plan.options["cache"], plan.options["opset"]) == (64, 24)


@pytest.mark.slow
def test_graphs_of_another_form_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8}
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **layers))
    with pytest.raises(ExportError, match=r"length of the past is read in a form .* leave out cache=32"):
        bridge.convert(model, "trt", "none", tmp_path / "out", cache=32, verify=False, progress=False)
    assert not list(tmp_path.iterdir())
    config = transformers.Lfm2Config(hidden_size=64, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(PlanError, match="keeps states of fixed size, not keys and values alone"):
        bridge.convert(transformers.Lfm2ForCausalLM(config), "trt", "none", tmp_path / "lfm", cache=32, progress=False)


@needs_rtx
@pytest.mark.parametrize("gpu", ["sm89", "sm120"])
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("none", {}), pytest.param("int8_wo", {}, marks=slow), pytest.param("fp8", {"kv": "fp8"}, marks=slow)],
)
def test_an_engine_writes_into_the_buffers_that_it_reads(
    scheme: str, options: dict[str, Any], gpu: str, tmp_path: Path
) -> None:
    """A kernel that makes `present` reads it too, at the same address, and none reads `past`, as a Concat does."""
    for cache in (128, True):
        layers = kernels(written_for_rtx(scheme, "fp16", cache=cache, **options) / "model.onnx", gpu, tmp_path)
        for name in ("0.key", "0.value"):
            writes = [line for line in layers if f"present.{name}" in outputs(line)]
            assert writes and any(f"past_key_values.{name}" in line for line in layers) == (cache is True)
            assert all(f"present.{name}" in inputs(line) for line in writes) == (cache is not True)


def kernels(graph: Path, gpu: str, folder: Path) -> list[str]:
    """The lines of an engine's layers that are kernels."""
    profile = Profile(batch=(1, 1, 2), sequence=(1, 16, 64), past_sequence=(0, 16, 64))
    job = {"task": "build", "graph": str(graph), "engine": str(folder / "engine"), "capabilities": [gpu]}
    built = run_builder({**job, "profiles": [asdict(profile)]}, lambda *at: None)["built"]
    return [line for line in built["layers"].splitlines() if line.startswith("Name:") and "LayerType:" in line]


def inputs(line: str) -> set[str]:
    return names(line.partition("Inputs: [")[2].partition("Outputs: [")[0])


def outputs(line: str) -> set[str]:
    return names(line.partition("Outputs: [")[2])


def names(text: str) -> set[str]:
    return set(re.findall(r"Name: ([^,]+),", text))
