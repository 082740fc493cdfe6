"""Losses against ModelOpt's, and models in two parts against the whole."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bridge.core.errors import TrainingError  # noqa: E402
from bridge.workflows.distill.head import SplitModel, chunks  # noqa: E402
from bridge.workflows.distill.losses import Answers, divergence, hidden_error  # noqa: E402
from tests.models.decoder_families import DECODERS, build  # noqa: E402

PREDICTS = sorted(name for name in DECODERS if "ForCausalLM" in name or name.endswith("LMHeadModel"))


def logits(seed: int) -> Any:
    return torch.randn(37, 97, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_is_that_of_modelopt(temperature: float) -> None:
    losses = pytest.importorskip("modelopt.torch.distill")
    student, teacher = logits(0).requires_grad_(), logits(1)
    own = divergence(student, Answers.of(teacher, temperature, None), temperature)
    (gradient,) = torch.autograd.grad(own.mean(), student)
    theirs = losses.LogitsDistillationLoss(temperature, reduction="none")(student, teacher)
    (expected,) = torch.autograd.grad(theirs.mean(), student)
    assert torch.allclose(own, theirs, rtol=1e-6, atol=1e-6)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)


def test_some_ids_bound_the_divergence_from_below_and_all_give_it() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    whole = divergence(student, Answers.of(teacher, 1.0, None), 1.0)
    before = torch.zeros(37)
    for k in (1, 4, 16, 64, 96):
        some = divergence(student, Answers.of(teacher, 1.0, k), 1.0)
        assert (some >= before - 1e-5).all() and (some <= whole + 1e-5).all()
        before = some.detach()
    all_but_one = divergence(student, Answers.of(teacher, 1.0, 96), 1.0)
    assert torch.allclose(all_but_one, whole, atol=1e-5)
    assert Answers.of(teacher, 1.0, 97).index is None
    (gradient,) = torch.autograd.grad(all_but_one.sum(), student)
    (expected,) = torch.autograd.grad(whole.sum(), student)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_ids_with_all_of_the_probability_have_a_finite_gradient() -> None:
    teacher = torch.full((3, 97), -200.0)
    teacher[:, :2] = 1.0
    student = logits(0)[:3].requires_grad_()
    loss = divergence(student, Answers.of(teacher, 1.0, 2), 1.0)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    whole = divergence(student, Answers.of(teacher, 1.0, None), 1.0)
    assert torch.allclose(loss, whole, atol=1e-4) and bool(gradient.isfinite().all())


def test_hidden_states_are_compared_by_their_mean_square() -> None:
    own, theirs = torch.ones(5, 4), torch.full((5, 4), 3.0)
    assert hidden_error(own, theirs, None).tolist() == [4.0] * 5
    double = torch.nn.Linear(4, 6, bias=False)
    torch.nn.init.constant_(double.weight, 1.0)
    assert hidden_error(own, torch.full((5, 6), 3.0), double).tolist() == [1.0] * 5


def test_chunks_cover_all_tokens() -> None:
    parts = chunks(5000, 128_256)
    assert [part.stop - part.start for part in parts][:2] == [130, 130]
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(5000))


@pytest.mark.parametrize("name", PREDICTS)
def test_a_head_on_some_tokens_gives_what_the_model_gives(name: str) -> None:
    model = build(name, torch.float32).eval()
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    split = SplitModel(model, batch, name)
    with torch.no_grad():
        whole = model(**batch, use_cache=False).logits.flatten(0, 1)
        trunk = split.trunk(batch)
        at = torch.tensor([1, 4, 13, 21])
        some = split.logits(trunk, trunk.last.flatten(0, 1)[at], ids.flatten()[at])
        again = model(**batch, use_cache=False).logits.flatten(0, 1)
    assert torch.allclose(some, whole[at], rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
    assert torch.equal(whole, again)  # the model runs as before


def test_a_model_without_a_part_below_its_head_is_refused() -> None:
    class Bare(torch.nn.Module):
        base_model_prefix = "model"

    with pytest.raises(TrainingError, match="Bare cannot be trained here: it has no part below its head"):
        SplitModel(Bare(), {}, "a test")
