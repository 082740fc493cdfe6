"""Copies of a model that are made inside a step, and forwards that others put in place."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.errors import InspectError  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.workflows.inspect.test_session import SIX, config  # noqa: E402

FAKE = config("FakeQuant", gemms=["fprop"], tensors=["weight"], quant_format="FP8E4M3")
LOGS = config(tensors=SIX, stats=["rms"])


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def model_of() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
@pytest.mark.parametrize("words", [FAKE, LOGS], ids=["changed", "watched"])
def test_a_copy_is_a_model_of_its_own(words: Any, copied: Any) -> None:
    model, x = model_of(), torch.randn(3, 16)
    plain = model(x)
    with bridge.inspecting(model, words) as session:
        twin = copied(model)
        assert torch.equal(twin(x), plain)
        session.step()
        assert not session.inspection.records
        with torch.no_grad():
            twin[0].weight.zero_()
        assert not torch.equal(twin(x), plain)
        with bridge.inspecting(twin, FAKE):
            twin(x)
    assert torch.equal(model(x), plain)


def test_a_copy_of_experts_is_a_model_of_its_own() -> None:
    model = built("mixtral").float()
    ids = torch.arange(3, 21).reshape(2, 9)
    with bridge.inspecting(model, LOGS) as session, torch.no_grad():
        twin = copy.deepcopy(model)
        before = twin(input_ids=ids).logits
        session.step()
        assert not session.inspection.records
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_forward_of_the_callers_stays() -> None:
    model, x = model_of(), torch.randn(3, 16)
    plain = model(x)
    with bridge.inspecting(model, FAKE):
        ours = model[0].forward
        model[0].forward = theirs = lambda x: 2 * ours(x)
        assert not torch.equal(model[0](x), 2 * type(model[0]).forward(model[0], x))
    assert model[0].forward is theirs
    assert torch.equal(model[0](x), 2 * type(model[0]).forward(model[0], x))
    with pytest.raises(InspectError, match="a forward of its own"), bridge.inspecting(model, FAKE):
        pass
    del model[0].forward
    assert torch.equal(model(x), plain)


def test_a_layer_that_another_session_changes_is_refused() -> None:
    words = config("FakeQuant", gemms=["fprop"], tensors=["weight"], quant_format="FP8E4M3", start_step=1)
    model = model_of()
    with bridge.inspecting(model, words) as outer, bridge.inspecting(model, FAKE):
        with pytest.raises(InspectError, match="another session changes it"):
            outer.step()
        assert "forward" in vars(model[0])
    assert "forward" not in vars(model[0])
