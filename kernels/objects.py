"""Find the machine code of a kernel file: beside it, else in the user's cache; compile it where neither has it.

A file of machine code is for one source, one system and one level of processors. It needs nothing of numba or of
Python, so it serves every version of both; a wheel carries those of the common processors.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = ("jit.py", "build.py")  # what else decides on the machine code
LEVELS = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
}  # of which a wheel has the code


def stored(module: str) -> tuple[dict[str, str], list[bytes]]:
    """Names of symbols by kernel and signature, and object files.

    CannotRun if this machine has none, and they cannot be compiled.
    """
    name = file_name(module, level())
    for directory in _directories():
        if (directory / name).is_file() and (found := unpacked((directory / name).read_bytes())):
            return found
    for directory in _directories():
        if _is_writable(directory):
            return _compiled(module, directory)
    with tempfile.TemporaryDirectory() as directory:
        warnings.warn(
            "kernels are compiled again in every process, some seconds for each file: no directory for their machine "
            "code can be written; set XDG_CACHE_HOME to one that can",
            RuntimeWarning,
            stacklevel=1,  # this line, so Python shows it once for all kernels
        )
        return _compiled(module, Path(directory))


def file_name(module: str, level: str) -> str:
    """Of the machine code of a kernel file."""
    return f"{module}-{digest(module)}.{sys.platform}-{level}"


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
    """Of all that decides on a file's machine code but the processor, as it is when the kernels are imported."""
    whole = hashlib.sha256()
    for name in (f"{module}.py", *COMPILER):
        whole.update((HERE / name).read_bytes())
    return whole.hexdigest()[:16]


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


def _directories() -> Iterator[Path]:
    """Where machine code may be, the first first."""
    yield HERE / "objects"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        yield (Path(base) if base else Path.home() / ".cache") / "qbridge" / "kernels"
    except RuntimeError:  # a user without a home directory
        return


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _compiled(module: str, directory: Path) -> tuple[dict[str, str], list[bytes]]:
    """Compile a file in a process of its own, which imports what this one does, and nothing of its directory."""
    from bridge.core.errors import CannotRun

    what = f"the kernels of {module}.py cannot be compiled for this processor ({level()})"
    if getattr(sys, "frozen", False):
        raise CannotRun(f"{what} in a frozen application; run `python -m bridge._kernels.build` before it is frozen")
    command = [sys.executable, "-P", "-m", "bridge._kernels.build", module]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in map(str, sys.path) if path and os.pathsep not in path)
    run = subprocess.run(
        [*command, "--level", level(), "--out", str(directory)], capture_output=True, text=True, env=env
    )
    path = directory / file_name(module, level())
    made = unpacked(path.read_bytes()) if not run.returncode and path.is_file() else None
    if made is None:
        last = run.stderr.strip().rpartition("\n")[2] or "its result is not there"
        raise CannotRun(f"{what}: {last}; try it yourself: {' '.join(command)}")
    return made
