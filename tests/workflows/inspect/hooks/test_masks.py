"""Which rows count under a mask."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from tests.workflows.inspect.test_session import config  # noqa: E402


class Masked(torch.nn.Module):
    """A model that takes a mask; `flat` multiplies a matrix of all tokens, in another order if `turns`."""

    def __init__(self, turns: bool = False) -> None:
        super().__init__()
        self.fc, self.flat, self.pooled, self.turns = (*(torch.nn.Linear(6, 6) for _ in range(3)), turns)

    def forward(self, x: Any, attention_mask: Any = None) -> Any:
        y = self.fc(x)
        return self.flat((y.transpose(0, 1) if self.turns else y).reshape(-1, 6)).sum() + self.pooled(y[:, 0]).sum()


def numels(model: Any, *calls: Any, call_fc: Any = None) -> tuple[dict[str, float | None], tuple[str, ...]]:
    settings = config(tensors=["activation", "gradient"], stats=["numel"])
    with bridge.inspecting(model, settings) as session:
        for x, mask in calls:
            model(x, attention_mask=mask).backward()
        if call_fc is not None:
            model.fc(call_fc)
        session.step()
    records = session.inspection.records
    return {f"{r.layer}_{r.tensor}": r.value for r in records}, session.inspection.notes


X, MASK = torch.ones(2, 3, 6), torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_a_mask_ends_with_its_forward() -> None:
    told, _ = numels(Masked(), (X, MASK), call_fc=X)
    assert told["fc_activation"] == (3 + 6) * 6 and told["fc_gradient"] == 3 * 6


@pytest.mark.parametrize("turns", [False, True])
def test_a_matrix_of_all_tokens_is_masked_where_their_order_is_certain(turns: bool) -> None:
    told, notes = numels(Masked(turns), (X, MASK))
    assert told["flat_activation"] == told["flat_gradient"] == 36 and told["pooled_activation"] == 12
    assert [note for note in notes if "attention_mask" in note] == [
        f"its rows are not certainly the tokens of attention_mask, so padding counts in {name}: 1 layer (flat)"
        for name in ("activation", "gradient")
    ]
    told, notes = numels(Masked(turns), (X[:1], MASK[:1]))
    assert told["flat_activation"] == told["flat_gradient"] == 12
    assert not any("attention_mask" in note for note in notes)


def test_transformers_models_keep_the_order_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Masked, "__module__", "transformers.models.some")
    assert numels(Masked(), (X, MASK))[0]["flat_activation"] == 3 * 6


def test_a_mask_of_four_axes_is_noted() -> None:
    told, notes = numels(Masked(), (X, torch.zeros(2, 1, 3, 3)))
    assert told["fc_activation"] == 36
    assert any(note.startswith("attention_mask has no row a sequence") for note in notes)
