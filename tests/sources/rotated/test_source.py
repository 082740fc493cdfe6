"""A rotated model answers as the model does, in every family with a table that allows it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.errors import PlanError, UsageError
from bridge.core.mappings import own_files, read_table
from bridge.planning.structure import structure_of
from bridge.sources.opening import open_source
from bridge.sources.rotated.matrices import hadamard_matrix
from bridge.sources.rotated.opening import rotated
from tests.models.decoder_families import build
from tests.sources.pruned.families import FAMILIES

# Families whose tables show every case: tied and biased; Gemma's norms and scaled embeddings; fused rows; MLA with
# experts; stacked experts stored [in, out] with biases; a state space; a gated delta net; a residual multiplier.
SHOWN = (
    "LlamaForCausalLM", "GemmaForCausalLM", "Phi3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
    "NemotronHForCausalLM", "Qwen3_5MoeForCausalLM", "GraniteMoeSharedForCausalLM", "Qwen2ForCausalLM",
)  # fmt: skip
MEAN = "its norm subtracts a mean, which a rotation changes"
OUTPUT = "no matrix that is known reads it: a norm of an output"
REFUSED = {
    "BertForMaskedLM": MEAN, "GPT2LMHeadModel": MEAN, "NemotronForCausalLM": MEAN, "Starcoder2ForCausalLM": MEAN,
    "Gemma2ForCausalLM": OUTPUT, "Gemma3ForCausalLM": OUTPUT, "Gemma4ForCausalLM": OUTPUT,
    "DeepseekV4ForCausalLM": "it mixes or scales channels of the stream",
}  # fmt: skip
NO_VALUES = (
    "DeepseekV4ForCausalLM", "Gemma4ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
)  # fmt: skip
# float32 on both sides: the differences are those of another order of sums, 1e-6 and for delta nets 2e-5 (measured).
TOLERANCE = 1e-4


def logits(model: Any) -> Any:
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def families(shown: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in shown else pytest.mark.product) for name in FAMILIES]


def test_every_table_is_asked() -> None:
    assert len(FAMILIES) == len(own_files("arch")) and {*REFUSED, *NO_VALUES, *SHOWN} <= FAMILIES.keys()
    assert all(name in read_table(path).data["architectures"] for name, path in _tables())


def _tables() -> list[tuple[str, Any]]:
    files = {path: read_table(path).data["architectures"] for path in own_files("arch")}
    return [(name, path) for name in FAMILIES for path, listed in files.items() if name in listed]


@pytest.mark.parametrize("family", families((*SHOWN, *REFUSED)))
def test_a_rotation_keeps_the_logits(family: str) -> None:
    model = build(family, torch.float32, **FAMILIES[family])
    source = open_source(model)
    if why := REFUSED.get(family):
        with pytest.raises(PlanError, match=re.escape(why)):
            rotated(source, "hadamard")
        return
    turned = rotated(source, "hadamard")
    structure_of(turned)  # covers every tensor by a row of the table, with the new config
    assert not turned.config.get("tie_word_embeddings", False)
    want, got = logits(model), logits(turned.load_model())
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    embedding = next(name for name in source.specs if "embed" in name)
    assert np.abs(turned.read(embedding) - source.read(embedding)).max() > 0.1


@pytest.mark.parametrize(
    "family", families(("MistralForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "Qwen3_5ForCausalLM"))
)
def test_a_rotation_of_heads_alone_keeps_norms_and_ties(family: str) -> None:
    model = build(family, torch.float32, **FAMILIES[family])
    source = open_source(model)
    if family in NO_VALUES:
        with pytest.raises(PlanError, match="no layer has values that one matrix makes and the next one reads"):
            rotated(source, "hadamard:heads")
        return
    turned = rotated(source, "hadamard:heads")
    assert turned.specs == source.specs and turned.config == source.config
    want, got = logits(model), logits(turned.load_model())
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    changed = [name for name in source.specs if not np.array_equal(source.read(name), turned.read(name))]
    assert changed and not any("norm" in name or "embed" in name for name in changed)


def test_rows_are_those_of_the_whole_tensor() -> None:
    source = rotated(open_source(build("GptOssForCausalLM", torch.bfloat16)), "hadamard")
    for name, spec in source.specs.items():
        rows = spec.shape[0]
        parts = [source.read_rows(name, begin, min(begin + 7, rows)) for begin in range(0, rows, 7)]
        assert np.array_equal(np.concatenate(parts), source.read(name)), name


def test_a_head_that_was_tied_has_the_norm_and_the_embedding_has_not() -> None:
    model = build("LlamaForCausalLM", torch.float32, tie_word_embeddings=True)
    turned = rotated(open_source(model), "hadamard:stream")
    matrix = hadamard_matrix(60, "stream").apply(np.eye(60)).T
    weight = model.model.embed_tokens.weight.detach().double().numpy()
    norm = model.model.norm.weight.detach().double().numpy()
    assert np.allclose(turned.read("model.embed_tokens.weight"), weight @ matrix, atol=1e-6)
    assert np.allclose(turned.read("lm_head.weight"), weight * norm @ matrix, atol=1e-6)
    assert (turned.read("model.norm.weight") == 1).all()
    assert b'"tie_word_embeddings": false' in bytes(turned.side_files["config.json"])


@pytest.mark.parametrize("size", [2, 10, 12, 20, 28, 36, 60, 64, 97, 100, 128, 576])
def test_matrices_are_orthogonal_and_even(size: int) -> None:
    matrix = hadamard_matrix(size, "test").apply(np.eye(size)).T
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() < 1e-13
    assert np.abs(matrix).max() * size**0.5 < (1 + 1e-12 if size not in (10, 97, 100) else 2.01)


@pytest.mark.parametrize(
    "size",
    [576, 640, 768, 896, 960, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192],
)
def test_usual_widths_have_hadamard_matrices_of_small_factors(size: int) -> None:
    factors = hadamard_matrix(size, "test").factors
    assert all(hadamard for _, hadamard in factors) and sum(order for order, _ in factors) < 70
    assert np.prod([order for order, _ in factors]) == size


def test_what_is_no_model_to_rotate_is_refused() -> None:
    source = open_source(build("LlamaForCausalLM", torch.float32))
    with pytest.raises(UsageError, match=r"rotate='hadamar' \(--rotate\): unknown; .*nearest: hadamard"):
        rotated(source, "hadamar")
    with pytest.raises(PlanError, match=r"rotated already \(hadamard\)"):
        rotated(rotated(source, "hadamard"), "hadamard:heads")
    with pytest.raises(PlanError, match="no file of mappings/arch lists OlmoForCausalLM"):
        rotated(open_source(build("OlmoForCausalLM", torch.float32)), "hadamard")
    with pytest.raises(PlanError, match="a norm of an output, or of a model without a head"):
        rotated(open_source(build("LlamaForCausalLM", torch.float32).model), "hadamard")
