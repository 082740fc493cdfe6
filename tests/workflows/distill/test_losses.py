"""Losses against ModelOpt's, and models in two parts against the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge.calibration import reference_outputs  # noqa: E402
from bridge.core.errors import TrainingError  # noqa: E402
from bridge.workflows.distill import train  # noqa: E402
from bridge.workflows.distill.head import SplitModel, chunks  # noqa: E402
from bridge.workflows.distill.losses import Answers, divergence, hidden_error, next_token_loss  # noqa: E402
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


@pytest.mark.parametrize("mask", [[1] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
def test_next_token_loss_is_that_of_verification(mask: list[int]) -> None:
    """Padding before and behind a row; the tokens in two parts."""
    own, ids = logits(5)[:9], torch.randint(0, 97, (9,), generator=torch.Generator().manual_seed(6))
    arrays = {"input_ids": ids[None].numpy(), "attention_mask": np.array([mask])}
    expected = reference_outputs.next_token_loss(own[None], arrays)
    kept = torch.tensor(mask).nonzero().flatten()
    parts = [next_token_loss(own[at].log_softmax(-1), ids, torch.tensor(mask), at) for at in (kept[:4], kept[4:])]
    assert sum(count for _, count in parts) == expected[1] == sum(mask) - 1
    assert sum(loss for loss, _ in parts) == pytest.approx(expected[0], rel=1e-6)


def test_gradients_are_cut_into_views_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SHARED", 10)
    tensors = [torch.arange(24.0).reshape(8, 3), torch.tensor(5.0), torch.ones(3, 4).T, torch.zeros(2)]
    found = list(train.pieces(tensors))
    assert all(sum(part.numel() for part in group) <= 10 for group in found)
    for group in found:
        for part in group:
            part += 1
    assert torch.equal(tensors[0], torch.arange(24.0).reshape(8, 3) + 1) and tensors[1] == 6
    assert bool((tensors[2] == 2).all()) and bool((tensors[3] == 1).all())


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
