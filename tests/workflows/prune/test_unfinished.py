"""A pruning that was stopped goes on with the same choice, and is not mixed with another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import bridge
from bridge.core.errors import BridgeWarning, WriteError

LLAMA = "examples/models/tiny-llama"
REPAIR: dict[str, Any] = {"repair": True, "samples": 16, "sequence": 64}


def stop_in(out: Path, keep: dict[str, Any], **words: Any) -> Path:
    """Interrupt a pruning when half is written; return what it leaves."""

    def interrupt(done: int, total: int, text: str) -> None:
        if text == "weights" and 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bridge.prune(LLAMA, keep, out, progress=interrupt, shard_size="500KB", **words)
    return out.with_name(f".{out.name}.partial")


@pytest.mark.slow
@pytest.mark.parametrize("words", [{"importance": "weights"}, REPAIR], ids=["weights", "repair"])
def test_the_same_choice_goes_on_to_the_same_bytes_and_another_is_refused(words: Any, tmp_path: Path) -> None:
    bridge.prune(LLAMA, {"ffn": 96}, tmp_path / "calm", shard_size="500KB", verify=False, **words)
    work = stop_in(tmp_path / "out", {"ffn": 96}, **words)
    for keep, other in (({"ffn": 95}, words), ({"ffn": 96}, words | {"order": "importance"})):
        with pytest.raises(WriteError, match="left from an unfinished run"):
            bridge.prune(LLAMA, keep, tmp_path / "out", shard_size="500KB", **other)
    assert work.is_dir()
    with pytest.warns(BridgeWarning, match=r"continues an unfinished run, which has [1-9]\d* of \d+ tensors"):
        bridge.prune(LLAMA, {"ffn": 96}, tmp_path / "out", shard_size="500KB", verify=False, **words)
    assert not work.exists()
    for path in (tmp_path / "calm").rglob("*.safetensors"):
        assert (tmp_path / "out" / path.relative_to(tmp_path / "calm")).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_other_data_choose_other_parts_or_solve_others_and_are_refused(tmp_path: Path) -> None:
    stop_in(tmp_path / "out", {"ffn": 96}, **REPAIR)
    with pytest.raises(WriteError, match="left from an unfinished run"):
        bridge.prune(LLAMA, {"ffn": 96}, tmp_path / "out", shard_size="500KB", **REPAIR | {"samples": 17})
    bridge.prune(LLAMA, {"ffn": 96}, tmp_path / "out", shard_size="500KB", resume=False, verify=False, **REPAIR)
    assert not (tmp_path / ".out.partial").exists()


def test_an_output_that_is_there_is_refused_before_the_model_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("bridge.calibration.importance.measure.measure_scores", None)
    with pytest.raises(WriteError, match="exists already; choose another directory"):
        bridge.prune(LLAMA, {"ffn": 96}, tmp_path / "out")
