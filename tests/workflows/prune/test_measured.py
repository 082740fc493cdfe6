"""Models that were pruned without a run: their perplexity is measured all the same, and a ruined one is not served."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from click.testing import CliRunner

import bridge
from bridge.calibration.data import prepare
from bridge.calibration.data.windows import evaluated_windows
from bridge.cli.main import app
from bridge.core.errors import CalibrationError
from bridge.sources.opening import open_source
from bridge.sources.pruned.source import PrunedSource
from bridge.verification.change import measure_change

MODEL = "examples/models/tiny-llama"
TEXT = "bridge/calibration/data/default_text.txt"


def loss_of(model: torch.nn.Module, rows: list[list[int]]) -> tuple[float, int]:
    """The summed loss of next tokens and their number, by transformers' model."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            total += float(model.float()(input_ids=ids, labels=ids).loss) * (len(row) - 1)
            count += len(row) - 1
    return total, count


def windows_of(source: object) -> list[list[int]]:
    windows = evaluated_windows(prepare(None, source).windows, 0)  # type: ignore[arg-type]
    return [list(window) for window in windows]


def test_dropping_layers_is_measured_and_a_ruined_model_is_not_served(tmp_path: Path) -> None:
    out = tmp_path / "few"
    ran = CliRunner().invoke(app, ["prune", MODEL, "--drop-layers", "0,1,2,3", "--out", str(out)])
    assert ran.exit_code == 3, ran.output
    said = " ".join(ran.stdout.split())
    source, smaller = open_source(MODEL), bridge.pruned(MODEL, drop_layers=[0, 1, 2, 3], progress=False)
    want = [
        math.exp(loss / count)
        for loss, count in (loss_of(s.load_model(), windows_of(source)) for s in (source, smaller))
    ]
    told = re.search(r"0 quantized; perplexity ([\d.,]+) -> ([\d.,]+) pruned", said)
    assert told and [float(figure.replace(",", "")) for figure in told.groups()] == pytest.approx(want, rel=1e-3)
    assert want[1] > 10 * want[0] and "times the source's" in said and "vllm serve" not in said
    report = bridge.verify(out, MODEL, progress=False)
    assert not report.passed and report.change == pytest.approx(want, rel=1e-4) and report.verdicts["cost"] == "failed"


def test_a_converted_pruned_model_and_one_of_two_layers_less_say_their_perplexity(tmp_path: Path) -> None:
    report = bridge.convert(bridge.pruned(MODEL, drop_layers=[2]), "hf", None, tmp_path / "one", progress=False)
    assert report.change and report.change[0] < report.change[1] < 10 * report.change[0] and report.passed
    assert f"perplexity {report.change[0]:,.2f} -> " in report.lines()[0]
    plain = bridge.convert(
        bridge.pruned(MODEL, drop_layers=[2]), "hf", None, tmp_path / "two", verify=False, progress=False
    )
    assert plain.change is None


def test_fewer_tokens_are_measured_by_the_text_they_were_kept_for() -> None:
    source, smaller = (
        open_source(MODEL),
        bridge.pruned(MODEL, {"vocab": "75%"}, data=TEXT, importance="weights", progress=False),
    )
    assert not smaller.perplexity
    with pytest.raises(CalibrationError, match=r"tokens were cut for other text than the embedded one; give yours"):
        measure_change(smaller, prepare(None, smaller))
    measure_change(smaller, prepare(TEXT, smaller))
    ours, whole = smaller.load_tokenizer(), source.load_tokenizer()
    rows = windows_of(smaller)  # of the same text
    texts = [whole(ours.decode(row))["input_ids"] for row in rows]
    before, count = loss_of(source.load_model(), texts)
    after, _ = loss_of(smaller.load_model(), rows)
    assert smaller.perplexity == pytest.approx((math.exp(before / count), math.exp(after / count)), rel=1e-4)


def test_a_model_that_gives_no_number_is_ruined(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = bridge.pruned(MODEL, drop_layers=[2], progress=False)
    plain = PrunedSource.read_rows

    def broken(self: PrunedSource, name: str, *args: object, **more: object) -> np.ndarray:
        array = plain(self, name, *args, **more)  # type: ignore[arg-type]
        return np.full_like(array, np.nan) if name == "model.norm.weight" else array

    monkeypatch.setattr(PrunedSource, "read_rows", broken)
    measure_change(smaller, prepare(None, smaller))
    assert smaller.perplexity[1] == math.exp(700.0)
