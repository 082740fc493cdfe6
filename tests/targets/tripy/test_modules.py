"""What `convert` wrote for Tripy, built and loaded, answers as the transformers model does, traced by nvtripy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.targets.tripy.models.build import READY
from tests.covering import grid
from tests.targets.tripy.models import LENGTH, MODELS, answer, expected, filled, ids, model, relative, write

# float32 sums of a few hundred products in another order, over two layers; 1e-6 at most was seen.
TOLERANCE = 5e-6
FAST = ("gpt2-bare", "llama")  # tracing costs 2 to 8 s a model
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


def test_every_ready_architecture_is_tested() -> None:
    tested = {architecture for architecture, _ in MODELS.values()}
    bare = {"MistralModel", "Qwen2Model", "Qwen3Model"}  # LlamaModel under the same rows as their heads'
    assert tested | bare == READY.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_written_module_answers_as_transformers(name: str, tp: Any, tmp_path: Path) -> None:
    source = model(name)
    module = filled(write(source, tmp_path / "out"))
    assert relative(answer(module, tp, ids()), expected(source, ids())) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-words", "bert-untied", "bert-pretraining"])
def test_head_of_words_is_filled_whether_it_is_tied_or_not(name: str, tp: Any, tmp_path: Path) -> None:
    source = model(name)
    found = filled(write(source, tmp_path / "out")).state_dict()
    assert found.keys() ^ source.state_dict().keys() == ({"cls.predictions.bias"} if name == "bert-untied" else set())
    bias = torch.from_dlpack(found["cls.predictions.decoder.bias"])
    assert torch.equal(bias, source.cls.predictions.decoder.bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-bare", "qwen2"])
def test_padding_on_either_side_is_not_seen(name: str, tp: Any, tmp_path: Path) -> None:
    source, mask = model(name), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7], mask[1, 60:] = 0, 0
    module = filled(write(source, tmp_path / "out"))
    wanted = expected(source, ids(), attention_mask=mask)
    assert relative(answer(module, tp, ids(), mask)[mask.bool()], wanted[mask.bool()]) <= TOLERANCE
    assert relative(expected(source, ids())[mask.bool()], wanted[mask.bool()]) > 1e-2, "the mask must matter"


@pytest.mark.slow
def test_bert_reads_mask_and_token_types(tp: Any, tmp_path: Path) -> None:
    source, mask = model("bert"), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 50:], kinds = 0, ids(vocab=6) - 3
    module = filled(write(source, tmp_path / "out"))
    wanted = expected(source, ids(), attention_mask=mask, token_type_ids=kinds)
    assert relative(answer(module, tp, ids(), mask, kinds)[mask.bool()], wanted[mask.bool()]) <= TOLERANCE


@grid({"name": ["gpt2", "llama", "qwen3"], "dtype": ["float16", "bfloat16"]})
def test_half_module_is_as_near_to_float32_as_transformers_is(name: str, dtype: str, tp: Any, tmp_path: Path) -> None:
    """Ours rounds no scores and rotations; `tp.Linear` rounds once more before it adds a bias (GPT-2: 1.15 times)."""
    half = model(name, getattr(torch, dtype))
    wanted = expected(model(name, getattr(torch, dtype)).float(), ids())
    module = filled(write(half, tmp_path / "out"))
    assert relative(answer(module, tp, ids()), wanted) <= 1.25 * relative(expected(half, ids()), wanted)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_inputs_tell_wrong_heads_rotation_and_window(name: str) -> None:
    """What the parity above would not see, nobody would: swapped heads, another rotation, a window left out."""
    source = model(name)
    wanted = expected(source, ids())
    decoder = source.model
    decoder.rotary_emb.inv_freq.copy_(decoder.rotary_emb.inv_freq.flip(0))
    assert relative(expected(source, ids()), wanted) > 1e-2
    source = model(name)
    weight = source.model.layers[0].self_attn.k_proj.weight.data
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))
    assert relative(expected(source, ids()), wanted) > 1e-2
    if getattr(source.config, "sliding_window", None) is not None:
        source = model(name)
        source.config.sliding_window = LENGTH
        assert relative(expected(source, ids()), wanted) > 1e-2
