"""What is measured without ModelOpt comes out of a walk as out of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from bridge.calibration.automatic import choose_samples  # noqa: E402
from bridge.calibration.data import Data, prepare  # noqa: E402
from bridge.calibration.importance.matrix import measure_importance  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.sources.source import Source  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

pytestmark = pytest.mark.slow


def saved(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Source, Source]:
    """The model for a run of the whole, and for a walk, which may not load it."""
    build(family, torch.float32).save_pretrained(tmp_path)
    walked = open_source(tmp_path)
    monkeypatch.setattr(walked, "load_model", lambda: pytest.fail("the whole model was loaded"), raising=True)
    return open_source(tmp_path), walked


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_importance_is_that_of_the_whole_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, walked = saved(family, tmp_path, monkeypatch)
    scheme, data = load_scheme("q4_0_imatrix"), prepare(batches(), whole)
    expected = measure_importance(CalibrationJob(whole, structure_of(whole), scheme, data))
    found = measure_importance(CalibrationJob(walked, structure_of(walked), scheme, data), by_blocks=True)
    assert expected.input_square and expected.held_out
    assert found.to_bytes() == expected.to_bytes()


@pytest.mark.parametrize(
    ("family", "quant"),
    [("LlamaForCausalLM", "int8_sq"), ("Qwen3MoeForCausalLM", "fp8"), ("MixtralForCausalLM", "int8_sq")],
)
def test_automatic_samples_are_those_of_the_whole_model(
    family: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, walked = saved(family, tmp_path, monkeypatch)
    scheme, random = load_scheme(quant), torch.Generator().manual_seed(5)
    rows = torch.randint(3, 97, (512, 4), generator=random)

    def cut(count: int) -> Data:
        kept = [{"input_ids": rows[at : at + 8]} for at in range(0, min(count, 512), 8)]
        return replace(prepare(kept, whole), samples=count)

    data: Any = replace(cut(512), cut=cut)
    expected = choose_samples(CalibrationJob(whole, structure_of(whole), scheme, data))
    found = choose_samples(CalibrationJob(walked, structure_of(walked), scheme, data), by_blocks=True)
    assert found.chosen == expected.chosen and found.samples == expected.samples > 32
