"""The module in whose code an exception was raised, from its traceback."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bridge.tracker import raised_in  # noqa: E402
from tests.tracker.recorded import Two, rows  # noqa: E402


def test_the_innermost_module_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Identity(), Two())})
    with pytest.raises(RuntimeError) as raised:
        model["body"](torch.ones(2, 7))
    assert raised_in(raised.value, model.named_modules()) == "body.1.a"
    assert raised_in(raised.value, nn.Linear(2, 2).named_modules()) == ""


def test_the_cause_says_more() -> None:
    model = Two()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            try:
                return self.model(given)  # type: ignore[no-any-return]
            except RuntimeError as error:
                raise ValueError("not that shape") from error

    around = Around()
    with pytest.raises(ValueError, match="not that shape") as raised:
        around(torch.ones(2, 7))
    assert raised_in(raised.value, around.named_modules()) == "model.a"
    assert around(rows()).shape == (2, 5)


def test_an_exception_that_was_never_raised_is_nowhere() -> None:
    assert raised_in(ValueError(), Two().named_modules()) == ""
