"""Runs Python code and `qbridge` commands in forks of one process that has imported everything, so that each begins in
milliseconds; must run nothing by itself that leaves threads working: a fork has none of them.

A fork is a process of its own: its namespace, working directory, environment and exit are those of a program that was
started. What it is not for: what a program imports, or how long that takes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import once

ROOT = Path(__file__).parent.parent


def python(code: str, directory: Path, seconds: float, arguments: Sequence[str] = ()) -> tuple[int, str]:
    """`python -c CODE ARGUMENTS` in `directory`: its exit code, and both streams in their order."""
    return together(code, directory, seconds, arguments, [{}])[0]


def together(
    code: str, directory: Path, seconds: float, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> list[tuple[int, str]]:
    """The same at once in as many processes as `environments`, each with one of them on top of ours."""
    asked = {"code": code, "arguments": [*arguments], "directory": str(directory), "seconds": seconds}
    return _server().ask([asked | {"environment": dict(os.environ) | more} for more in environments])


def qbridge(arguments: list[str], directory: Path, seconds: float) -> tuple[int, str]:
    """The console command, in the same way."""
    asked = {"arguments": arguments, "directory": str(directory), "seconds": seconds, "environment": dict(os.environ)}
    return _server().ask([asked])[0]


class _Server:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.forks"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, asked: list[dict[str, Any]]) -> list[tuple[int, str]]:
        assert self._process.stdin
        shared = {"shared": once.ROOT and str(once.ROOT)}
        self._process.stdin.write(json.dumps([one | shared for one in asked]) + "\n")
        self._process.stdin.flush()
        return [(code, said) for code, said in self._answer()]

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    _warm()
    gc.collect()
    gc.freeze()  # or each fork copies what it only looks through
    answers.write('[0, ""]\n')
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_served(json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)


def _warm() -> None:
    from bridge.core.version import loads_transformers

    loads_transformers()  # as if the command had: graphs are kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not installed here, at length
        import modelopt.torch.quantization  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from tests.models.graphs import use_once

    torch.set_num_threads(1)  # before any of its threads exists, in every fork
    # nearly every page writes the tiny Llama as ONNX; its float graph depends on no weight and no scheme
    use_once(str(ROOT / "examples/models/tiny-llama"))


def _served(asked: list[dict[str, Any]]) -> list[tuple[int, str]]:
    with ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile()) for _ in asked]
        running = [_started(one, file.fileno()) for one, file in zip(asked, said, strict=True)]
        until = time.monotonic() + asked[0]["seconds"]
        codes = [_ended(pid, until) for pid in running]
        for file in said:
            file.seek(0)
        return [(code, file.read().decode()) for code, file in zip(codes, said, strict=True)]


def _started(asked: dict[str, Any], said: int) -> int:
    if not (pid := os.fork()):
        _child(asked, said)
    return pid


def _ended(pid: int, until: float) -> int:
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(asked: dict[str, Any], said: int) -> None:
    code = 1
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(said, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(asked["directory"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        tempfile.tempdir = None
        once.ROOT = asked["shared"] and Path(asked["shared"])
        code = _run(asked)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(asked: dict[str, Any]) -> int:
    """Run it as `__main__`; its exit code, a traceback where it has one."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if "code" in asked:
            sys.argv, sys.path[0] = ["-c", *asked["arguments"]], ""
            exec(compile(asked["code"], "<string>", "exec"), vars(module))
        else:
            from bridge.__main__ import main as command

            sys.argv, sys.path[0] = ["qbridge", *asked["arguments"]], str(Path(sys.executable).parent)
            command()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
