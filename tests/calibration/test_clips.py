"""Clips of INT4 blocks are those that ModelOpt's awq_clip finds, however many rows it searches at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from bridge.calibration import schedule  # noqa: E402
from bridge.calibration.algorithms import clips  # noqa: E402
from bridge.calibration.algorithms.clips import rows_at_once, settle_clip, take_clips  # noqa: E402
from bridge.calibration.schedule import method_of  # noqa: E402
from bridge.core.errors import CalibrationError  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from tests.models.calibrated_models import IDS, built, run  # noqa: E402
from tests.oracles.modelopt_oracle import ask  # noqa: E402


def loop(model: Any) -> None:
    for ids in IDS[:-1]:  # the last batch is held out
        model(ids)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [("llama", "int4_awq_clip"), ("gpt2", "int4_awq_full")])
def test_clips_are_those_of_modelopts_search(family: str, scheme: str) -> None:
    model = built(family)
    found, theirs = run(model, load_scheme(scheme)), ask(model, scheme, loop).calibration
    assert found.weight_clip.keys() == theirs.weight_clip.keys()
    for module, clip in found.weight_clip.items():
        np.testing.assert_array_equal(clip, theirs.weight_clip[module], err_msg=module)
    assert any((clip < 1).any() for clip in found.weight_clip.values())
    assert bool(found.awq_scale) == (scheme == "int4_awq_full")
    assert found.awq_scale.keys() <= found.weight_clip.keys()


@pytest.mark.slow
def test_fewer_rows_at_once_change_no_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scheme = built("llama"), load_scheme("int4_awq_clip")
    expected = run(model, scheme).weight_clip
    monkeypatch.setattr(schedule, "rows_at_once", lambda inputs: 7)
    assert method_of("awq_clip", scheme, 64)["max_co_batch_size"] == 7
    found = run(model, scheme).weight_clip
    assert all(np.array_equal(found[name], clip) for name, clip in expected.items())


def test_one_product_of_the_search_stays_within_its_bytes() -> None:
    assert all(clips.search_bytes(n) <= clips.PRODUCT for n in (4096, 8192, 28672, 53248))
    assert rows_at_once(0) == rows_at_once(2048) == clips.ROWS


class Search:
    def __init__(self, losses: dict[float, list[float]]) -> None:
        self.num_tokens = 1
        self.loss = {ratio: torch.tensor([loss]) for ratio, loss in losses.items()}


def test_the_first_of_equal_losses_is_taken_and_a_loss_without_a_number_clips_nothing() -> None:
    module: Any = torch.nn.Linear(4, 1)
    module.awq_clip = Search(
        {0.5: [3, 1, float("nan"), 2], 0.75: [2, 1, float("nan"), 2], 1.0: [2, 1, float("nan"), 1]}
    )
    binding: Any = type("Binding", (), {"module": "m", "format": load_scheme("int4_awq_clip").format})
    root = torch.nn.ModuleDict({"m": module})
    assert take_clips(root, [binding])["m"].tolist() == [[0.75, 0.5, 1.0, 1.0]]
    assert not hasattr(module, "awq_clip")


def test_a_module_that_no_token_reached_keeps_its_amax_and_another_matrix_is_refused() -> None:
    clip, (applied,) = settle_clip("m", {"weight_clip": {}}, (2, 3))
    assert clip.shape == (2, 3) and (clip == 1).all() and applied.case == "never seen"
    with pytest.raises(
        CalibrationError, match=r"m: the model in memory has blocks \(4, 3\), and the checkpoint \(2, 3\)"
    ):
        settle_clip("m", {"weight_clip": {"m": np.ones((4, 3), np.float32)}}, (2, 3))
