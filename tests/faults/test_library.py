"""What happens when things go wrong in the middle: killed, disk full, sources that change, two runs at once.

A run that dies leaves nothing visible, and the next one ends with the bytes of a run that nobody disturbed.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.api import request
from bridge.core.errors import BridgeError, SourceError, WriteError, notes_of
from bridge.core.output.names import JOURNAL
from bridge.streaming import run as stream
from tests.faults.commands import make_checkpoint
from tests.faults.struck import contents

# Runs a conversion and kills its own process, or fails, at the n-th of the calls that change the disk.
VICTIM = """
import os, signal, sys
from pathlib import Path
import bridge
left = int(sys.argv[3])
def counted(call):
    def wrapped(*args, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **more)
    return wrapped
os.pwrite, os.posix_fallocate, Path.mkdir = counted(os.pwrite), counted(os.posix_fallocate), counted(Path.mkdir)
Path.rename, Path.write_text, Path.write_bytes = (counted(c) for c in (Path.rename, Path.write_text, Path.write_bytes))
Path.unlink = counted(Path.unlink)
from bridge.core.output.directory import Work
Work.mark = counted(Work.mark)
bridge.convert(sys.argv[1], target=sys.argv[4], quant=sys.argv[5], out=sys.argv[2], verify=False)
print(left)
"""
MANY = 1_000_000  # more calls than any of these conversions makes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in two shards."""
    root = tmp_path_factory.mktemp("checkpoint") / "llama"
    make_checkpoint(root)
    return root


def convert(checkpoint: Path, out: Path, quant: str = "nvfp4_wo", **more: Any) -> Any:
    return bridge.convert(checkpoint, target="hf", quant=quant, out=out, verify=False, **more)


def seen(out: Path) -> dict[str, bytes]:
    """What is read of an output; a journal that was not removed yet is nobody's."""
    return {name: content for name, content in contents(out).items() if name != JOURNAL}


def victim(checkpoint: Path, out: Path, at: int, quant: str = "nvfp4_wo") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", VICTIM, str(checkpoint), str(out), str(at), "hf", quant]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_killed_at_any_call_resumes_to_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """Of the library, at a few calls: `tests.faults` kills every command."""
    convert(checkpoint, tmp_path / "calm")
    calm = contents(tmp_path / "calm")
    whole = victim(checkpoint, tmp_path / "count", MANY)
    calls = MANY - int(whole.stdout)
    assert calls > 50
    last = range(calls - 2, calls + 1)  # journal, rename, what comes after it
    for number, at in enumerate(sorted({*random.Random(1).sample(range(1, calls), 6), *last})):
        out = tmp_path / f"killed-{number}"
        died = victim(checkpoint, out, at)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not out.exists() or seen(out) == calm, f"call {at} of {calls}: something half-written shows"
        if not out.exists():
            convert(checkpoint, out)
        assert seen(out) == calm, f"killed at call {at} of {calls}"
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(f".killed-{number}")] == []


@pytest.mark.slow
def test_a_resumed_run_does_not_write_again_what_was_finished(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = MANY - int(victim(checkpoint, tmp_path / "count", MANY).stdout)
    victim(checkpoint, out, whole - 10)
    rest = MANY - int(victim(checkpoint, out, MANY).stdout)
    assert rest < whole / 2


@pytest.mark.slow
@pytest.mark.parametrize(("call", "kept"), [(1, False), (2, False), (9, True), (40, True)])
def test_a_full_disk_keeps_what_is_done_and_says_so(
    call: int, kept: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call goes on when there is room again; where nothing was done yet, nothing is left."""
    left, real = [call], os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match="disk is full") as told:
        convert(checkpoint, tmp_path / "out")
    assert ("nothing was kept" in str(told.value)) is not kept
    assert [path.name for path in tmp_path.iterdir()] == ([".out.partial"] if kept else [])
    assert [f"is kept in {tmp_path / '.out.partial'}" in note for note in notes_of(told.value)] == [True] * kept
    used = []
    for name in ("out", "calm"):
        left[0] = MANY
        convert(checkpoint, tmp_path / name)
        used.append(MANY - left[0])
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")
    assert (used[0] < used[1]) is kept


def test_a_disk_that_is_too_small_is_refused_before_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(fd: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no)
    with pytest.raises(WriteError, match="disk is full"):
        convert(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(checkpoint, tmp_path / "calm")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at))
    convert(checkpoint, tmp_path / "short")
    assert contents(tmp_path / "short") == contents(tmp_path / "calm")


@pytest.mark.parametrize("what", ["grows", "shrinks", "is written", "vanishes", "is replaced"])
def test_a_shard_that_changes_while_it_is_read_stops_the_run(what: str, checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()

    def harm(done: int, total: int, text: str) -> None:
        if text != "weights" or not shard.exists() or shard.read_bytes() != data or shard.stat().st_ino != inode:
            return
        if what == "vanishes":
            shard.unlink()
        elif what == "is replaced":
            (copy / "new").write_bytes(data)
            (copy / "new").rename(shard)
        elif what == "is written":
            shard.write_bytes(data[:-2] + b"\0\0")
        else:
            shard.write_bytes(data + b"\0" if what == "grows" else data[:-2])

    inode = shard.stat().st_ino
    with pytest.raises(SourceError, match=r"changed since|cannot be opened"):
        convert(copy, tmp_path / "out", progress=harm)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_read_error_in_the_middle_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [30], os.preadv

    def broken(fd: int, buffers: Any, at: int) -> int:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BridgeError, match="Input/output error"):
        convert(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_run_is_not_continued_for_another_scheme(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    victim(checkpoint, out, 40, quant="int8_wo")
    with pytest.raises(WriteError, match="unfinished run"):
        convert(checkpoint, out, quant="nvfp4_wo")
    convert(checkpoint, out, quant="nvfp4_wo", resume=False)
    convert(checkpoint, tmp_path / "calm", quant="nvfp4_wo")
    assert contents(out) == contents(tmp_path / "calm")


def busiest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks ran at once, each time one began; the first ones wait for each other, so that all can."""
    running, seen, real, lock = [0], [], stream._run_task, threading.Lock()

    def counted(*given: Any) -> None:
        with lock:
            running[0] += 1
            seen.append(running[0])
        time.sleep(0.05)
        real(*given)
        with lock:
            running[0] -= 1

    monkeypatch.setattr(stream, "_run_task", counted)
    return seen


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        together = busiest(monkeypatch)
        convert(checkpoint, tmp_path / str(cores))
        found.append(contents(tmp_path / str(cores)))
        assert max(together) == cores
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_what_appears_at_the_output_meanwhile_is_not_touched(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def intrude(done: int, total: int, text: str) -> None:
        if text == "weights":
            out.mkdir(exist_ok=True)
            (out / "precious.txt").write_text("mine")

    with pytest.raises(WriteError, match=r"not written by bridge|exists already"):
        convert(checkpoint, out, progress=intrude)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    (out / "precious.txt").unlink()
    out.rmdir()
    convert(checkpoint, out)  # takes up the finished work
    convert(checkpoint, tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")


@pytest.mark.slow
def test_a_killed_run_resumes_where_the_disk_holds_its_work_once_only(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    victim(checkpoint, out, 60)
    kept = sum(path.stat().st_blocks * 512 for path in (tmp_path / ".out.partial").iterdir())
    assert kept > 100_000
    usage = shutil.disk_usage(tmp_path)
    plan = bridge.plan(checkpoint, "hf", "nvfp4_wo")
    free = plan.disk + request.BASE_TEXT_BYTES + request.TENSOR_TEXT_BYTES * len(plan.outputs) - kept
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    convert(checkpoint, out)


def test_more_shards_than_a_process_may_hold_open(checkpoint: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 12, hard))
    try:
        convert(checkpoint, tmp_path / "out", shard_size="40KB")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 12
