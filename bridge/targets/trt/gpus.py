"""Names of GPUs, and what TensorRT for RTX builds for them.

The table is `mappings/runtimes/tensorrt-rtx.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache

from bridge.core.errors import UsageError
from bridge.core.mappings import mappings, read_table
from bridge.planning.contract_files import find_runtime
from bridge.planning.plan import Step
from bridge.quant.describe import contract_words, numeric_words

RUNTIME = "tensorrt-rtx"
PARTS = ("gpus", "elsewhere")
ELSEWHERE = "TensorRT for RTX has no kernels for it; run the line of trtexec.txt with the full TensorRT on that machine"


@cache
def _names() -> tuple[dict[str, str], dict[str, str]]:
    """Name or architecture -> architecture: of GPUs that the builder knows, oldest first, and of others."""
    file = read_table(mappings() / "runtimes" / f"{RUNTIME}.toml")
    known, others = ({name: sm for sm, names in file.section(part).items() for name in (sm, *names)} for part in PARTS)
    return known, others


def capabilities() -> list[str]:
    """The architectures that TensorRT for RTX builds for, oldest first."""
    return list(dict.fromkeys(_names()[0].values()))


def gpu_names() -> list[str]:
    """Every name and architecture that TensorRT for RTX builds for."""
    return sorted(_names()[0])


def parse_gpus(given: str | Sequence[str]) -> tuple[str, ...]:
    """The architectures of some GPUs, oldest first: "rtx4090,rtx5090" gives ("sm89", "sm120").

    UsageError for a name that is unknown, or whose GPU TensorRT for RTX has no kernels for.
    """
    words = given.split(",") if isinstance(given, str) else given
    known, others = _names()
    found = set()
    for word in words:
        name = re.sub(r"[\s_\-.]|nvidia|geforce", "", word.lower())
        name = f"rtx{name}" if f"rtx{name}" in known else name
        if name in others:
            raise UsageError(f"gpu {word.strip()!r} ({others[name].upper()}): {ELSEWHERE}")
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.5) or capabilities()
            raise UsageError(f"gpu {word.strip()!r} is unknown; nearest: {', '.join(near)} (`qbridge show runtimes`)")
        found.add(known[name])
    return tuple(sm for sm in capabilities() if sm in found)


def why_no_engine(steps: Sequence[Step], dtype: str, architectures: Sequence[str]) -> list[str]:
    """Why no engine of a plan runs on the oldest of some architectures: it lacks a number format; [] if it has all."""
    order, oldest = capabilities(), architectures[0]
    runtime = find_runtime(RUNTIME)
    assert runtime
    contract = runtime.contracts[0]
    used = {contract_words(step.scheme_format): contract.loads for step in steps if step.scheme_format}
    used |= {numeric_words(step.kv): contract.kv for step in steps if step.kv}
    needs = {f"{words} has kernels": rows[words].since for words, rows in used.items() if words in rows}
    if dtype in ("bfloat16", "float32"):
        needs[f"{dtype} products are there (pass --dtype fp16)"] = "sm80"
    return [
        f"no engine for {oldest.upper()}: {what} from {since.upper()} on; choose newer GPUs or another scheme"
        for what, since in needs.items()
        if order.index(oldest) < order.index(since)
    ]
