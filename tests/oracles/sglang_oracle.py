"""SGLang's answer to a checkpoint: what its loader reads, what it changes, and the logits of its own model.

SGLang runs in vLLM's environment (`make oracles`), its compiled kernels replaced: `tests.oracles.sglang_runtime`.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracles import vllm_oracle
from tests.oracles.vllm_oracle import Answer, Processes

VERSION = "0.5.23"
PACKAGES = Path(sys.prefix) / "sglang"
STAMP = Path(sys.prefix) / f".sglang-{VERSION}"


def require() -> None:
    """Skip the test that calls, with the command that makes the environment."""
    vllm_oracle.require()
    if not STAMP.is_file():
        pytest.skip(f"SGLang {VERSION} is not installed here; install it with: make oracles")


def ask(directory: Path, ids: Sequence[int], load_only: bool = False, kv: str = "auto") -> Answer:
    """SGLang's answer; a refusal is one too. No logits if only loaded, or if a tensor was not read."""
    with TemporaryDirectory() as work:
        out = Path(work) / "logits.safetensors"
        request = {"directory": str(directory.resolve()), "ids": list(ids), "out": str(out), "load_only": load_only}
        (reply,) = _processes().ask(request | {"kv": kv})
        if "error" in reply:
            return Answer(reply["error"], reply["trace"])
        logits = load_file(out)["logits"] if out.is_file() else np.empty(0)
        unread, unset = (tuple(reply[kind]) for kind in ("unread", "unset"))
        return Answer("", "", reply["quantization"], unread, unset, reply["changed"], logits)


@functools.cache
def _processes() -> Processes:
    processes = Processes(1, "sglang_runtime", PACKAGES)
    atexit.register(processes.close)
    return processes
