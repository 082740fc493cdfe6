"""One process a worker that has imported torch and megatron-core; oracles run in forks of it."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any


@functools.cache
def processes() -> Any:
    """Where processes come from: a fork begins in milliseconds, importing torch and megatron-core takes ten seconds.

    A fork may put a folder before the installed packages: what the server has not imported is then found there. Oracles
    of another ModelOpt, of peft, diffusers and Transformer Engine cannot be forks: their packages, and those that are
    there with them, change what transformers, ModelOpt or megatron-core import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.oracles.server_imports"])
    return context
