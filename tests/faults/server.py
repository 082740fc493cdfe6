"""Runs commands of `qbridge` in forks of one process that has imported everything, each with one fault.

It is asked by lines of JSON. It must run nothing by itself that leaves threads working: a fork has none of them.

    {"argv": ["convert", ...], "place": "/place", "at": 17, "action": "kill", ...}  ->  {"code": -9, "calls": 17, ...}
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
ACTIONS = {"count": 0, "kill": 1, "fail": 2, "signal": 3, "clock": 4}
CLASSES = {"change": 1, "space": 2, "read": 4, "rename": 8}
PART = 32 << 10  # bytes of an upload in parts: of 16 MiB, no model here would have two
WORKER = "bridge.workflows.batch.engines.worker"  # in the command line of each
GRACE = 10.0  # seconds that a child of a killed run has to notice it

WARNING = re.compile(r"^warning: .*\n", re.MULTILINE)  # on stderr, whatever happens


def main() -> None:
    """Answer until the input ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w")
    _warm()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(json.dumps(_warmed(asked) if asked.get("warm") else _served(asked)) + "\n")
        answers.flush()
    os._exit(0)  # nothing is left to do but to unload what was imported, which some of it complains about


def _warm() -> None:
    """Import what any command imports: a fork then starts in milliseconds."""
    import boto3  # noqa: F401
    import obstore.auth.boto3  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import bridge.calibration.modelopt
    import bridge.cli.main
    import bridge.core.remote.upload
    import bridge.targets.onnx.export.export
    import bridge.verification.verify
    import bridge.workflows.golden.verbs

    bridge.core.remote.objects.PART = PART
    from tests.faults.commands import TINY
    from tests.models.graphs import use_once

    torch.set_num_threads(1)  # before any of its threads exists, in every fork
    use_once(str(TINY))  # a graph is made in memory: a kill during it is one before the next call that changes the disk


def _warmed(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command here, so that forks find its kernels and modules loaded."""
    os.chdir(asked["place"])
    from bridge.cli.main import app

    try:
        app(asked["argv"], prog_name="qbridge")
    except SystemExit as ended:
        assert not ended.code, ended.code
    gc.collect()
    gc.freeze()  # or each fork copies what it only looks through
    os.chdir("/")
    return {}


def _served(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command, or `copies` of it that begin together, each in a fork; all end before this returns."""
    place, copies = Path(asked["place"]), asked.get("copies", 1)
    begin = time.monotonic()
    wait, go = os.pipe()
    ready, begun = os.pipe()
    pids = []
    for number in range(copies):
        _said(place, number, "said").touch()
        if not (pid := os.fork()):
            os.close(go)
            os.read(wait, 1)  # ends when the server closes its side: all begin at once
            _child(asked, place, number, begun)
        pids.append(pid)
    for fd in (wait, go, begun):
        os.close(fd)
    os.read(ready, 1)
    os.close(ready)
    if "after" in asked:
        _signal_after(pids[0], asked)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    seconds = time.monotonic() - begin
    orphans = _orphans(threading.get_native_id())
    calls = _said(place, 0, "calls")
    return {
        "code": codes[0],
        "seconds": seconds,
        "said": WARNING.sub("", _said(place, 0, "said").read_text()),
        "calls": int(calls.read_text()) if calls.exists() else None,
        "orphans": orphans,
        "shared": [p.name for p in Path("/dev/shm").iterdir() if any(str(pid) in p.name for pid in pids)],
        "others": [[code, _said(place, at, "said").read_text()] for at, code in enumerate(codes[1:], 1)],
    }


def _said(place: Path, number: int, what: str) -> Path:
    """What a copy of the command said, or counted: beside its folder, which faults are for."""
    return place.with_name(f"{place.name}.{number}.{what}")


def _signal_after(pid: int, asked: dict[str, Any]) -> None:
    """Send each signal after the same time again, unless the child has ended.

    `worker`: to that of its children, the time beginning when it is there.
    """
    while "worker" in asked and len(_workers(pid)) <= asked["worker"] and not _ended(pid):
        time.sleep(0.002)
    for number in asked.get("signals", [signal.SIGKILL]):
        deadline = time.monotonic() + asked["after"]
        while time.monotonic() < deadline:
            if _ended(pid):
                return
            time.sleep(min(0.002, max(deadline - time.monotonic(), 0)))
        with suppress(ProcessLookupError, IndexError):
            os.kill(_workers(pid)[asked["worker"]] if "worker" in asked else pid, number)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _workers(pid: int) -> list[int]:
    """The processes that a batch has started, whichever thread of it did."""
    found = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return sorted(map(int, found.split()))


def _child(asked: dict[str, Any], place: Path, number: int, begun: int) -> None:
    code = 99
    try:
        said = os.open(_said(place, number, "said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(said, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        (place / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place / "tmp")
        os.chdir(place)
        from bridge.cli.main import main

        os.environ.update(asked.get("env", {}))
        _arm(asked, place)
        sys.argv = ["qbridge", *asked["argv"]]
        for which in (signal.SIGINT, signal.SIGTERM):  # one that comes when the command is done is not for it
            signal.signal(which, signal.SIG_IGN)
        os.close(begun)
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        sys.stdout.flush()
        if "worker" not in asked:
            _said(place, number, "calls").write_text(str(ctypes.CDLL(None).fault_calls()))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _arm(asked: dict[str, Any], place: Path) -> None:
    """Arm this process, or with `worker` the process of that number among the workers that it starts."""
    which = sum(CLASSES[name] for name in asked.get("classes", ["change"]))
    action, at, number = ACTIONS[asked.get("action", "count")], asked.get("at", 0), asked.get("number", 0)
    folder, lasting = str(asked.get("folder", place)), int(asked.get("lasting", False))
    if "worker" not in asked:
        ctypes.CDLL(None).fault_arm(folder.encode(), which, ctypes.c_long(at), action, number, lasting)
    elif "after" not in asked:
        words = f"{which} {at} {action} {number} {lasting} {folder}\n{_said(place, 0, 'calls')}"
        _arm_worker(asked["worker"], words)


def _arm_worker(worker: int, words: str) -> None:
    """Start that worker with FAULT_ARM, which `shim.c` looks for, and everything else without."""
    started = itertools.count()

    def starts(event: str, about: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            os.environ.pop("FAULT_ARM", None)
            if any(WORKER in str(word) for word in about[1]) and next(started) == worker:
                os.environ["FAULT_ARM"] = words

    sys.addaudithook(starts)


def _orphans(thread: int) -> list[str]:
    """Command lines of processes that outlived the command; they are ended."""
    children = Path(f"/proc/self/task/{thread}/children")
    deadline = time.monotonic() + GRACE
    while (left := children.read_text().split()) and time.monotonic() < deadline:
        for pid in map(int, left):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    said = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]
    for pid in map(int, left):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return said


if __name__ == "__main__":
    main()
