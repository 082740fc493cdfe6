"""vLLM's answer to a checkpoint: what its loader reads, what it changes, and the logits of its own model.

vLLM runs in an environment of its own (`make oracles`), its compiled kernels replaced: `tests.oracles.vllm_runtime`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix) / "vllm" / "bin" / "python"
VERSION = "0.33.0"
LOGGED = 2000  # characters that are shown of what a process printed before it ended
STAMP = Path(sys.prefix) / f".vllm-{VERSION}"
# Parameters that vLLM makes for any checkpoint and fills itself where the file has none.
OWN = ("q_scale", "prob_scale", "k_zero_point", "v_zero_point", "q_zero_point", "w13_bias", "w2_bias")
CACHE = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Answer:
    """One checkpoint as vLLM loaded it, or the error by which it refused."""

    error: str = ""
    trace: str = field(default="", repr=False)  # where in vLLM it was raised
    quantization: str = ""
    unread: tuple[str, ...] = ()  # tensors of the files that nothing was made of
    unset: tuple[str, ...] = ()  # parameters of vLLM's model that the files did not set, or not whole
    changed: Mapping[str, int] = field(default_factory=dict)  # FP8 weight -> codes that are not those of the file
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))

    def missing(self, kv: bool = False, weight_only: bool = False) -> list[str]:
        """Parameters that the files should have set: caches and inputs have scales only if they are quantized."""
        optional = OWN if kv else (*OWN, *CACHE)
        if weight_only:  # NVFP4's layers have a scale for inputs that their weight-only kernel does not read
            optional += ("input_scale", "input_global_scale")
        return [name for name in self.unset if not name.endswith(optional)]


def require() -> None:
    """Skip the test that calls, with the command that makes the environment."""
    if not STAMP.is_file():
        pytest.skip(f"vLLM {VERSION} is not installed here; install it with: make oracles")


def ask(directory: Path, ids: Sequence[int], ranks: int = 1, kv: str = "auto", inputs: bool = False) -> Answer:
    """vLLM's answer; `ranks` processes of tensor parallelism on gloo. A refusal is an answer too.

    inputs: whether layers with tiles of FP8 round what they read, as they do on a GPU.
    """
    with TemporaryDirectory() as work:
        out = Path(work) / "logits.safetensors"
        request = {"directory": str(directory.resolve()), "ids": list(ids), "out": str(out), "kv": kv, "inputs": inputs}
        replies = _processes(ranks).ask(request)
        if failed := next((reply for reply in replies if "error" in reply), None):
            if ranks > 1:
                RUNNING.pop(ranks).close()  # a group that failed half-way is not used again
            return Answer(failed["error"], failed["trace"])
        unread, unset = (
            tuple(sorted({name for reply in replies for name in reply[kind]})) for kind in ("unread", "unset")
        )
        changed: dict[str, int] = {}
        for reply in replies:
            for name, count in reply["changed"].items():
                changed[name] = changed.get(name, 0) + count
        return Answer("", "", replies[0]["quantization"], unread, unset, changed, load_file(out)["logits"])


def ask_drafts(directory: Path, draft: Path | None = None) -> Answer:
    """vLLM's answer when it loads draft layers alone, as it does beside the model for speculative decoding.

    draft: an EAGLE-3 draft of the model; None for the layers of the model itself.
    """
    kind = {"method": "eagle3", "model": str(draft.resolve())} if draft else {"method": "mtp"}
    request = {"directory": str(directory.resolve()), "ids": [1, 2], "drafts": kind | {"num_speculative_tokens": 1}}
    (reply,) = _processes(1).ask(request)
    if "error" in reply:
        return Answer(reply["error"], reply["trace"])
    return Answer("", "", reply["quantization"], tuple(reply["unread"]), tuple(reply["unset"]))


class Processes:
    """One process a rank; they load checkpoint after checkpoint, since importing a server takes ten seconds.

    `runtime`: the package of its stand-ins. `path`: where the server is, if not in the environment.
    """

    def __init__(self, ranks: int, runtime: str = "vllm_runtime", path: Path | None = None) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (ROOT, path))))}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [PYTHON, "-m", f"tests.oracles.{runtime}.process"]
        self.log = TemporaryFile()  # noqa: SIM115  # as long as the processes
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        for process in self.ranks:
            assert process.stdin
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return [self._reply(process) for process in self.ranks]

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def _reply(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            self.log.seek(0)
            last = self.log.read().decode(errors="replace")[-LOGGED:]
            raise RuntimeError(f"the server's process ended with code {process.wait()}: {last}")
        reply: dict[str, Any] = json.loads(line)
        return reply


RUNNING: dict[int, Processes] = {}


def _processes(ranks: int) -> Processes:
    if ranks not in RUNNING:
        RUNNING[ranks] = Processes(ranks)
        atexit.register(RUNNING[ranks].close)
    return RUNNING[ranks]
