"""A walk that was killed goes on at the next block and gives the same bytes; another run's work is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from bridge.calibration.data import Data, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.requirements import source_for  # noqa: E402
from bridge.calibration.walk.resume import Partial  # noqa: E402
from bridge.calibration.walk.run import Walk, calibrate_by_blocks  # noqa: E402
from bridge.core.errors import BridgeWarning, WriteError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.sources.source import Source  # noqa: E402
from tests import forks  # noqa: E402
from tests.calibration.walk.walked_models import KINDS, batches  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.decoder_families import DECODERS, OTHERS, build  # noqa: E402

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
import bridge
from bridge.calibration.walk.resume import Partial
from tests.calibration.walk.walked_models import KINDS, batches

keep, count = Partial.keep, 0
def killing(*args):
    global count
    kept = keep(*args)
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return kept
Partial.keep = killing
bridge.calibrate(sys.argv[1], "int4_awq", batches(), kv="fp8", memory=sys.argv[4], partial=sys.argv[2])
"""
SMALL = """
from bridge.calibration.walk import blocks, budget, states
blocks.LEAF, budget.BASE, states.SMALL = 4096, 0, 0
"""


class _Stopped(BaseException):
    """Stands for the end of a process."""


def calibrated(model: Path, partial: Path | None, scheme: str = "int4_awq", kv: str | None = "fp8") -> Calibration:
    source = open_source(model)
    structure = structure_of(source)
    bound = load_scheme(scheme, kv=kv).bound(structure.sites)
    data = prepare(batches("Conditional" in str(source.config["architectures"])), source)
    return calibrate_by_blocks(CalibrationJob(source, structure, bound, data, partial=partial))


def stopping(after: int) -> Callable[..., bool]:
    """`Partial.keep` that ends the run when it has kept a number of blocks."""
    keep = Partial.keep
    kept = 0

    def stop(*args: Any) -> bool:
        nonlocal kept
        done = keep(*args)
        kept += 1
        if kept == after:
            raise _Stopped
        return done

    return stop


# what ModelOpt refuses
REFUSED = {
    "fp8": ("BambaForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM", "MambaForCausalLM", "FalconForCausalLM"),
    "int4_awq": ("FalconForCausalLM",),
}


@grid(
    {
        "family": [*DECODERS, *OTHERS],
        "scheme": [("fp8", "fp8"), ("int4_awq", "fp8"), ("int8_sq", None), ("int4_gptq", None)],
        "after": [1, 2, 3, 4],
    },
    valid=lambda family, scheme, _: family not in REFUSED.get(scheme[0], ()),
    cost=lambda _, scheme, __: scheme[0].startswith("int4"),  # what searches takes three times as long
    later=lambda family, *_: family not in KINDS,
)
def test_a_run_that_ends_after_any_block_goes_on_to_the_same_bytes(
    family: str, scheme: tuple[str, str | None], after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family, torch.float32).save_pretrained(tmp_path / "model")
    model, partial = tmp_path / "model", tmp_path / "partial"
    expected = calibrated(model, None, *scheme).digest
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stopping(after))
        try:
            assert calibrated(model, partial, *scheme).digest == expected  # fewer blocks are kept
            return
        except _Stopped:
            pass
    assert (partial / "journal.jsonl").exists()
    again: list[str] = []
    start_again = Partial.start_again
    monkeypatch.setattr(Partial, "start_again", lambda self: (again.append(self.blocks[-1]), start_again(self))[1])
    assert calibrated(model, partial, *scheme).digest == expected
    assert not partial.exists()
    assert not again or any(block in again[0] for block in CARRIED.get(family, ()))  # the others are taken up


# blocks after which a later one gets more than the last one put out
CARRIED = {
    "BartForConditionalGeneration": ("decoder",),
    "Gemma4ForCausalLM": ("layers",),
    "T5ForConditionalGeneration": ("decoder",),
}


@pytest.mark.slow
def test_finished_blocks_do_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("LlamaForCausalLM", torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stopping(2))
        with pytest.raises(_Stopped):
            calibrated(tmp_path / "model", tmp_path / "partial")
    visited: list[str] = []
    visit = Walk._visit

    def noted(self: Walk, block: Any) -> Any:
        visited.append(block.name)
        return visit(self, block)

    monkeypatch.setattr(Walk, "_visit", noted)
    with pytest.warns(BridgeWarning, match=r"continues after block 2 of 4, model\.layers\.0"):
        calibrated(tmp_path / "model", tmp_path / "partial")
    assert visited == ["model.layers.1", "lm_head"]


@pytest.mark.slow
def test_the_work_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("LlamaForCausalLM", torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stopping(1))
        with pytest.raises(_Stopped):
            calibrated(tmp_path / "model", tmp_path / "partial")
    with pytest.raises(WriteError, match="is left from an unfinished run"):
        calibrated(tmp_path / "model", tmp_path / "partial", "fp8", None)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["compute", "held_out"])
def test_another_dtype_or_other_held_out_inputs_are_another_run(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("LlamaForCausalLM", torch.bfloat16, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    structure, data = structure_of(source), prepare(batches(), source)
    scheme = load_scheme("fp8").bound(structure.sites)

    def attempt(source: Source, data: Data) -> None:
        calibrate_by_blocks(CalibrationJob(source, structure, scheme, data, partial=tmp_path / "partial"))

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stopping(1))
        with pytest.raises(_Stopped):
            attempt(source, data)
    if other == "compute":
        source = source_for(source, "fp32")
    else:
        data = replace(data, held_out=({**data.held_out[0], "input_ids": data.held_out[0]["input_ids"].flip(1)},))
    with pytest.raises(WriteError, match="is left from an unfinished run"):
        attempt(source, data)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "file"), [("fp8", "block-00000.safetensors"), ("int4_gptq", "codes.bin")])
def test_statistics_that_were_changed_since_are_taken_again(
    scheme: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("LlamaForCausalLM", torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stopping(2))
        with pytest.raises(_Stopped):
            calibrated(tmp_path / "model", tmp_path / "partial", scheme, None)
    kept = tmp_path / "partial" / file
    content = bytearray(kept.read_bytes())
    content[-2] ^= 1
    kept.write_bytes(content)
    found = calibrated(tmp_path / "model", tmp_path / "partial", scheme, None)
    assert found.digest == calibrated(tmp_path / "model", None, scheme, None).digest


@pytest.mark.slow
def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("LlamaForCausalLM", torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("bridge.calibration.walk.run.collect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrated(tmp_path / "model", tmp_path / "partial")
    assert not (tmp_path / "partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, pytest.param(2, marks=pytest.mark.product)])
def test_a_killed_process_goes_on(after: int, tmp_path: Path) -> None:
    """400 kB do not hold the activations, which are in files when the process is killed."""
    model, partial = tmp_path / "model", tmp_path / "partial"
    build("LlamaForCausalLM", torch.float32, num_hidden_layers=4).save_pretrained(model)
    script = SMALL + KILLED
    code, said = forks.python(script, ROOT, 300, [str(model), str(partial), str(after), "400kB"])
    assert code == -signal.SIGKILL, said
    assert len(list(partial.glob("block-*.safetensors"))) == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "partial"]
    assert {path.name.partition("-")[0] for path in partial.iterdir()} == {"block", "states", "journal.jsonl"}
    assert calibrated(model, partial).digest == calibrated(model, None).digest
    assert not partial.exists()
