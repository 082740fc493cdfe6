"""Find the machine code of a kernel file: beside it, else in the user's cache; compile it where neither has it.

A file of machine code is for one source and one level of processors. It needs nothing of numba or of Python, so it
serves every version of both; a wheel carries those of the common processors.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = ("jit.py", "build.py")  # what else decides on the machine code
LEVELS = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
}  # of which a wheel has the code


def stored(module: str) -> tuple[dict[str, str], list[bytes]]:
    """Names of symbols by kernel and signature, and object files."""
    name = f"{module}-{digest(module)}.{level()}"
    for directory in (HERE / "objects", user_cache()):
        if (directory / name).is_file() and (found := unpacked((directory / name).read_bytes())):
            return found
    directory = HERE / "objects" if os.access(HERE, os.W_OK) else user_cache()
    command = [sys.executable, "-m", "bridge._kernels.build", module, "--level", level(), "--out", str(directory)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr.strip()}")
    made = unpacked((directory / name).read_bytes())
    assert made, f"{directory / name} changed while it was read"
    return made


def packed(names: dict[str, str], parts: list[bytes]) -> bytes:
    """One file of what `stored` returns: a digest of the rest, a line of JSON, the object files."""
    head = json.dumps({"names": names, "sizes": [len(part) for part in parts]}, sort_keys=True)
    body = b"\n".join((head.encode(), b"".join(parts)))
    return hashlib.sha256(body).digest() + body


def unpacked(data: bytes) -> tuple[dict[str, str], list[bytes]] | None:
    """Undo `packed`; None if the file is damaged."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        return None
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    parts, at = [], 0
    for size in head["sizes"]:
        parts.append(rest[at : at + size])
        at += size
    return head["names"], parts


@cache
def digest(module: str) -> str:
    """Of all that decides on a file's machine code but the processor."""
    found = hashlib.sha256()
    for name in (f"{module}.py", *COMPILER):
        found.update((HERE / name).read_bytes())
    return found.hexdigest()[:16]


@cache
def level() -> str:
    """The processors whose code this machine runs: a level of x86-64, else this kind alone."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if platform.machine() in ("x86_64", "AMD64"):
        for name, needed in LEVELS.items():
            if all(features.get(feature) for feature in (*LEVELS["x86-64-v3"], *needed)):
                return name
    return f"{platform.machine()}-{llvm.get_host_cpu_name()}"


def user_cache() -> Path:
    """Where machine code is kept that has no place beside the kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qbridge" / "kernels"
