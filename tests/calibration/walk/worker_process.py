"""One of the processes that share a calibration: runs named cases, and writes what each gave as JSON."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

import bridge
from bridge.calibration.walk import blocks
from bridge.cli.main import app
from bridge.core.output.names import JOURNAL
from tests.calibration.walk.walked_models import batches

blocks.LEAF = 4096
RANK = int(os.environ["RANK"])


def cell(root: Path, family: str, quant: str, kv: str | None) -> str:
    return bridge.calibrate(root / family, quant, batches(count=6), kv=kv).digest


def own_group(meeting: Path) -> None:
    """A process group of the caller; they meet in a file, since a second store on one port may wait for the first."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=RANK, world_size=2)


def with_a_group(root: Path) -> str:
    """The caller's own process group stays."""
    own_group(root / "group-with")
    try:
        digest = cell(root, "GPT2LMHeadModel", "int8_sq", None)
        assert torch.distributed.get_world_size() == 2
        return digest
    finally:
        torch.distributed.destroy_process_group()


def alone(root: Path) -> str:
    """Rank 0 calibrates by itself, although there is a process group."""
    own_group(root / "group-alone")
    try:
        if RANK:
            return ""
        return bridge.calibrate(root / "GPT2LMHeadModel", "int8_sq", batches(count=6), workers=1).digest
    finally:
        torch.distributed.destroy_process_group()


def one_batch(root: Path) -> str:
    return bridge.calibrate(root / "GPT2LMHeadModel", "int8_sq", batches(count=2)).digest


def other_data(root: Path) -> str:
    return bridge.calibrate(root / "LlamaForCausalLM", "fp8", batches(count=4 + RANK)).digest


def other_weights(root: Path) -> str:
    return bridge.calibrate(root / ("LlamaForCausalLM" if RANK else "other"), "fp8", batches()).digest


def no_model(root: Path) -> str:
    return bridge.calibrate(root / ("nowhere" if RANK else "LlamaForCausalLM"), "fp8", batches()).digest


def nan(root: Path) -> str:
    """Only a token of the last batch makes NaN, so that rank 1 alone finds it."""
    return bridge.calibrate(root / "broken", "fp8", batches(count=6)).digest


def a_bug(root: Path) -> str:
    """A failure that is no BridgeError, in one process."""

    def progress(*_: Any) -> None:
        raise ZeroDivisionError("of rank 0")

    return bridge.calibrate(root / "LlamaForCausalLM", "fp8", batches(), progress=progress).digest


def a_loop(root: Path) -> str:
    return bridge.calibrate(root / "LlamaForCausalLM", "fp8", lambda model: model(torch.ones(1, 4).long())).digest


def converted(root: Path) -> str:
    out = root / "converted"
    report = bridge.convert(root / "LlamaForCausalLM", "hf", "fp8", out, kv="fp8", calib=batches(count=6))
    assert report.passed and out.is_dir()
    return report.plan_digest


def converted_again(root: Path) -> str:
    """The output exists: the error of rank 0 reaches all."""
    return converted(root)


def command_line(root: Path, sequence: int = 32) -> Any:
    """The command in this process: its exit code, and what it prints."""
    words = ["calibrate", "examples/models/tiny-llama", "--quant", "fp8", "--samples", "8", "--sequence", str(sequence)]
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app([*words, "--overwrite", "--out", str(root / "of-command.safetensors")], standalone_mode=False)
        except SystemExit as stop:
            code = stop.code
    return [code, out.getvalue(), err.getvalue()]


def command_that_fails(root: Path) -> Any:
    return command_line(root, 4000)


def killed(root: Path) -> str:
    """Rank 1 is killed when it has kept two blocks."""
    from bridge.calibration.walk.resume import Partial

    keep, kept = Partial.keep, 0

    def dying(*args: Any) -> bool:
        nonlocal kept
        kept += 1
        if kept == 3 and RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        return keep(*args)

    Partial.keep = dying  # type: ignore[method-assign,assignment]
    return kept_beside(root)


def kept_beside(root: Path) -> str:
    return bridge.calibrate(
        root / "LlamaForCausalLM", "fp8", batches(count=6), kv="fp8", partial=root / "beside"
    ).digest


def resumed(root: Path) -> str:
    """Interrupted where rank 0 has kept a block more than rank 1."""
    from bridge.calibration.walk.resume import Partial

    keep, kept = Partial.keep, 0

    def stopping(*args: Any) -> bool:
        nonlocal kept
        kept += 1
        if kept == 2 and RANK:
            raise KeyboardInterrupt
        done = keep(*args)
        if kept == 2:
            raise KeyboardInterrupt
        return done

    def run() -> str:
        return bridge.calibrate(root / "LlamaForCausalLM", "w4a8_awq", batches(count=6), partial=root / "kept").digest

    Partial.keep = stopping  # type: ignore[method-assign,assignment]
    try:
        run()
    except KeyboardInterrupt:
        assert (root / "kept" / JOURNAL).exists()
    finally:
        Partial.keep = keep  # type: ignore[method-assign]
    digest = run()
    assert not [*root.glob("kept*")]
    return digest


def outcome(root: Path, case: str | list[Any]) -> Any:
    try:
        return globals()[case](root) if isinstance(case, str) else cell(root, *case)
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "reported_elsewhere", False)]


def main() -> None:
    """Run the cases of argv in order: a name, or a cell as a list."""
    root, results = Path(sys.argv[1]), {}
    for case in json.loads(sys.argv[2]):
        results[case if isinstance(case, str) else "-".join(map(str, case))] = outcome(root, case)
    (root / f"results-{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # a hang tells where
    main()
