"""The two graphs of an encoder-decoder against transformers: at once, step by step, padded, and quantized."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import BridgeError, CannotRun
from bridge.targets.generation import Settings
from bridge.targets.onnx.files import GENAI
from bridge.targets.onnx.run.encoder_decoder import EncoderDecoder, TextGenerator
from bridge.verification.outputs import relative_l2
from tests import once
from tests.models.seq2seq_families import FAMILIES, KINDS, seq2seq, sources, targets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOLERANCE = 2e-5  # see test_export.py
EACH = [pytest.param(name, marks=() if name in KINDS else pytest.mark.product) for name in FAMILIES]


def data(family: str) -> list[dict[str, torch.Tensor]]:
    return [{**sources(family, 3, seed), "decoder_input_ids": targets(3, seed)} for seed in (1, 2)]


def converted(family: str, scheme: str) -> tuple[Path, Any]:
    """An output, made once a run, and its report."""

    def make(directory: Path) -> None:
        report = bridge.convert(seq2seq(family), "trt", scheme, directory / "out", data=data(family), progress=False)
        (directory / "passed").write_text(json.dumps([report.passed, [o.relative_l2 for o in report.parity.outputs]]))

    made = once.directory(f"seq2seq-{family}-{scheme}", make)
    return made / "out", json.loads((made / "passed").read_text())


@functools.cache
def answer(family: str) -> tuple[Any, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The model, three rows of a padded source and of a target, and transformers' logits."""
    model, given, tokens = seq2seq(family), sources(family, 3, 7), targets(3, 8)
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=tokens, use_cache=False).logits
    return model, {name: tensor.numpy() for name, tensor in given.items()}, tokens.numpy(), logits.numpy()


@pytest.mark.parametrize("family", EACH)
def test_logits_at_once_and_step_by_step_equal_transformers_with_padded_sources(family: str) -> None:
    out, (passed, _) = converted(family, "none")
    assert passed
    model, given, tokens, want = answer(family)
    runtime = EncoderDecoder(out)
    at_once = runtime.run({**given, "decoder_input_ids": tokens})["logits"]
    assert np.abs(at_once - want).max() < TOLERANCE * np.abs(want).max()
    source, own = runtime.source(given), {}
    for step in range(8):
        logits, own = runtime.step(tokens[:, step : step + 1], source, own)
        assert np.abs(logits - want[:, step]).max() < TOLERANCE * np.abs(want).max()
    np.testing.assert_array_equal(runtime.generate(given, 8), greedy(model, given, 8))


def greedy(model: Any, given: dict[str, np.ndarray], count: int) -> np.ndarray:
    """Tokens by whole runs: `generate` makes caches of as many layers as the encoder of T5 has."""
    first = next(iter(given.values()))
    tokens = torch.full((len(first), 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        source = model.get_encoder()(**{name: torch.tensor(array) for name, array in given.items()})
        mask = {"attention_mask": torch.tensor(given["attention_mask"])} if "attention_mask" in given else {}
        for _ in range(count):
            whole = model(encoder_outputs=source, **mask, decoder_input_ids=tokens, use_cache=False)
            tokens = torch.cat([tokens, whole.logits[:, -1:].argmax(-1)], 1)
    return tokens.numpy()


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param(family, scheme, marks=() if (family, scheme) == ("t5", "fp8") else pytest.mark.product)
        for family in FAMILIES
        for scheme in ("fp8", "int8", "int4_wo")
    ],
)
def test_quantized_graphs_lie_nearer_to_modelopt_than_the_schemes_own_error(family: str, scheme: str) -> None:
    """The report's own comparison; both graphs hold codes."""
    out, (passed, errors) = converted(family, scheme)
    assert passed and all(error < 0.5 for error in errors)
    _, given, tokens, want = answer(family)
    got = EncoderDecoder(out).run({**given, "decoder_input_ids": tokens})["logits"]
    assert 1e-4 < relative_l2(got, want) < 0.5
    import onnx

    for file in ("encoder.onnx", "decoder.onnx"):
        kinds = {node.op_type for node in onnx.load(out / file, load_external_data=False).graph.node}
        assert "DequantizeLinear" in kinds, file


def test_the_manifest_joins_the_graphs_and_a_text_generator_reads_it() -> None:
    out, _ = converted("t5", "none")
    joined = json.loads((out / GENAI).read_text())["model"]
    assert (joined["encoder"]["filename"], joined["decoder"]["filename"]) == ("encoder.onnx", "decoder.onnx")
    model, given, _, _ = answer("t5")
    ids = given["input_ids"][2:]  # a row without padding
    tokens = list(TextGenerator(out).generate(ids[0].tolist(), Settings(tokens=8)))
    assert tokens == greedy(model, {"input_ids": ids}, 8)[0, 1:].tolist()


def test_a_forced_token_follows_the_start() -> None:
    pair = EncoderDecoder(converted("t5", "none")[0])
    given = answer("t5")[1]
    free = pair.generate(given, 3)
    pair.first = forced = int(free[0, 1]) + 1
    tokens = pair.generate(given, 3)
    assert (tokens[:, 1] == forced).all() and (tokens[:, 0] == free[:, 0]).all() and tokens.shape == free.shape


def test_sound_is_no_text_to_answer() -> None:
    with pytest.raises(CannotRun, match="the encoder reads input_features, not text"):
        TextGenerator(converted("whisper", "none")[0])


def test_a_cache_in_codes_is_refused() -> None:
    with pytest.raises(BridgeError, match="from one graph to another as they are; leave out kv"):
        bridge.plan(seq2seq("t5"), "trt", "fp8", kv="fp8")


def test_genai_speaks_from_whispers_graphs() -> None:
    og = pytest.importorskip("onnxruntime_genai")
    out, _ = converted("whisper", "none")
    model, given, _, _ = answer("whisper")
    features = given["input_features"][:1]
    speaker = og.Model(str(out))
    params = og.GeneratorParams(speaker)
    params.set_search_options(max_length=9, do_sample=False)
    generator = og.Generator(speaker, params)
    inputs = og.NamedTensors()
    inputs["input_features"] = features
    generator.set_inputs(inputs)
    generator.append_tokens(np.array([[2]], np.int32))
    for _ in range(8):
        generator.generate_next_token()
    want = greedy(model, {"input_features": features}, 8)
    np.testing.assert_array_equal(generator.get_sequence(0), want[0])
