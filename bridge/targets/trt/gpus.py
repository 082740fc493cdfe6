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
from bridge.core.text import ALIKE
from bridge.planning.contract_files import find_runtime
from bridge.planning.plan import Step
from bridge.quant.describe import contract_words, explained, numeric_words

RUNTIME = "tensorrt-rtx"
ELSEWHERE = (
    "TensorRT for RTX has no kernels for it; leave it out here, and on a machine with that GPU run the line of the "
    "output's trtexec.txt with the full TensorRT"
)


# What names of shops and of `nvidia-smi` have beside the name: "NVIDIA A100-SXM4-80GB", "RTX 4090 Laptop GPU".
_REST = re.compile(r"nvidia|geforce|tesla|quadro|laptop|gpu|generation|pcie|sxm\d?|hbm\d\w?|\d+gb|super|max-q|[\s_\-.]")


@cache
def _names() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Name -> architectures that the builder knows, oldest first; name -> architecture of GPUs that it does not."""
    file = read_table(mappings() / "runtimes" / f"{RUNTIME}.toml")
    known: dict[str, tuple[str, ...]] = {}
    for sm, names in file.section("gpus").items():
        for name in (sm, *names):
            known[name] = (*known.get(name, ()), sm)
    others = {name: sm for sm, names in file.section("elsewhere").items() for name in (sm, *names)}
    return known, others


def capabilities() -> list[str]:
    """The architectures that TensorRT for RTX builds for, oldest first."""
    return list(read_table(mappings() / "runtimes" / f"{RUNTIME}.toml").section("gpus"))


def gpu_names() -> list[str]:
    """Every name and architecture that TensorRT for RTX builds for."""
    return sorted(_names()[0])


def parse_gpus(given: str | Sequence[str]) -> tuple[str, ...]:
    """The architectures of some GPUs, oldest first: "rtx4090,rtx5090" gives ("sm89", "sm120").

    UsageError for a name that is unknown, or whose GPU TensorRT for RTX has no kernels for.
    """
    words = given.split(",") if isinstance(given, str) else given
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise UsageError(f"gpu {given!r}: give names or architectures, as in rtx4090,rtx5090 or sm89")
    known, others = _names()
    found: set[str] = set()
    for word in words:
        name = _name(word)
        if name in others:
            raise UsageError(f"gpu {word.strip()!r} ({others[name].upper()}): {ELSEWHERE}")
        if name not in known:
            near = get_close_matches(name, [*known, *others], n=3, cutoff=ALIKE)
            said = f"nearest: {', '.join(near)}; " if near else ""
            remedy = f"write the name of an NVIDIA GPU (rtx4090) or an architecture: {', '.join(capabilities())}"
            raise UsageError(f"gpu {word.strip()!r} is unknown; {said}{remedy}")
        found.update(known[name])
    return tuple(sm for sm in capabilities() if sm in found)


def _name(word: str) -> str:
    """A name as the table has it: "NVIDIA GeForce RTX 4090 Laptop GPU" is rtx4090, "4090" too, "8.9" is sm89."""
    known = {**_names()[0], **_names()[1]}
    bare = word.strip().lower()
    if re.fullmatch(r"\d+\.\d", bare):
        return f"sm{bare.replace('.', '')}"
    name = _REST.sub("", bare)
    return next((one for one in (name, f"rtx{name}", name.removesuffix("ti")) if one in known), name)


def why_no_engine(steps: Sequence[Step], dtype: str, architectures: Sequence[str]) -> list[str]:
    """Why no engine of a plan runs on the oldest of some architectures: it lacks a number format; [] if it has all."""
    order, oldest = capabilities(), architectures[0]
    runtime = find_runtime(RUNTIME)
    assert runtime
    contract = runtime.contracts[0]
    used = {contract_words(step.scheme_format): contract.loads for step in steps if step.scheme_format}
    used |= {numeric_words(step.kv): contract.kv for step in steps if step.kv}
    unknown = [
        f"no build shows what TensorRT for RTX makes of {explained(words)}"
        for words, rows in used.items()
        if words not in rows
    ]
    needs = {explained(words): rows[words].since for words, rows in used.items() if words in rows}
    if dtype in ("bfloat16", "float32"):
        needs[f"products in {dtype} (pass --dtype fp16)"] = "sm80"
    return unknown + [
        f"no engine for {oldest.upper()}: it has no kernels for {what}, which {since.upper()} has; choose newer GPUs "
        "or another scheme"
        for what, since in needs.items()
        if order.index(oldest) < order.index(since)
    ]
