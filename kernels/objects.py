"""Find the machine code of a kernel file: beside it, else in the user's cache; compile it where neither has it.

A file of machine code is for one source, one system and one level of processors. It needs nothing of numba or of
Python, so it serves every version of both; a wheel carries those of the common processors. It is a shared library if a
linker was at hand when it was made, which loads in less than a millisecond; else it holds object files, which llvmlite
links in every process, in 0.1 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BESIDE = HERE / "objects"
COMPILER = ("jit.py", "build.py")  # what else decides on the machine code
OF_LINUX = {"abm": "lzcnt", "bmi1": "bmi"}  # features that have another name there
LINKED = ".so"  # the end of a shared library's name
NAMES = "kernel_symbols"  # its text of symbols by kernel and signature, in JSON
_KEPT: list[Any] = []
LEVELS = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
}  # of which a wheel has the code


def stored(module: str, linked: bool = True) -> Path:
    """The machine code of a kernel file; CannotRun if this machine has none, and it cannot be compiled.

    `linked`: a shared library will do.
    """
    reasons = []
    for directory in _directories():
        if reason := _why_unusable(directory):
            reasons.append(reason)
        elif found := _found(module, directory, linked):
            return found
    for directory in _directories():
        if _is_writable(directory):
            return _made_once(module, directory, linked)
    _say_again("; ".join(reasons) or "no directory for their machine code can be written")
    return _compiled(module, _temporary(), linked)


def _made_once(module: str, directory: Path, linked: bool) -> Path:
    """Compile a file, in one process at a time: the others wait, and find it."""
    from bridge.core.output import cache as files

    with files.exclusively("kernels", files.digest_of([str(directory), file_name(module, level()), linked])):
        if found := _found(module, directory, linked):
            return found
        made = _compiled(module, directory, linked)
    if directory != BESIDE:
        files.make_room("kernels")
    return made


@cache
def _temporary() -> Path:
    """A directory that is removed when the process ends."""
    import tempfile

    _KEPT.append(made := tempfile.TemporaryDirectory())
    return Path(made.name)


def _found(module: str, directory: Path, linked: bool = True) -> Path | None:
    """A whole file of machine code, the shared library before the other, the own level before lower ones."""
    here, known = level(), list(LEVELS)
    paths = []
    for name in [file_name(module, one) for one in (known[known.index(here) :] if here in LEVELS else [here])]:
        paths += [directory / f"{name}{LINKED}"] * linked + [directory / name]
    found = next((path for path in paths if _is_whole(path)), None)
    if found and directory != BESIDE:
        with suppress(OSError):
            os.utime(found)  # those that were not used for longest are removed first
    return found


def _is_whole(path: Path) -> bool:
    if not path.is_file() or (path.parent != BESIDE and _why_untrusted(path)):
        return False
    return opened(path.read_bytes()) is not None


def file_name(module: str, level: str) -> str:
    """Of the machine code of a kernel file."""
    return f"{module}-{digest(module)}.{sys.platform}-{level}"


def sealed(data: bytes) -> bytes:
    """A file's content, with a digest at its end; what loads a shared library does not look behind it."""
    return data + hashlib.sha256(data).digest()


def opened(data: bytes) -> bytes | None:
    """Undo `sealed`; None if the file is damaged."""
    return data[:-32] if hashlib.sha256(data[:-32]).digest() == data[-32:] else None


def packed(names: dict[str, str], parts: list[bytes]) -> bytes:
    """Symbols by kernel and signature in a line of JSON, then object files."""
    head = json.dumps({"names": names, "sizes": [len(part) for part in parts]}, sort_keys=True)
    return b"\n".join((head.encode(), b"".join(parts)))


def unpacked(body: bytes) -> tuple[dict[str, str], list[bytes]]:
    """Undo `packed`."""
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
    """The processors whose code this machine runs: a level of x86-64, else this kind with these features alone.

    A virtual machine may hide features of its processor.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        features = _features()
        for name, needed in LEVELS.items():
            if features.issuperset((*LEVELS["x86-64-v3"], *needed)):
                return name
    import llvmlite.binding as llvm

    features = sorted(name for name, has in llvm.get_host_cpu_features().items() if has)
    few = hashlib.sha256(" ".join(features).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{llvm.get_host_cpu_name()}-{few}"


def _features() -> set[str]:
    """What the processor has, in LLVM's words; Linux says it without LLVM, whose import takes 0.1 s."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:  # noqa: PTH123 -- the first alone
            flags = next(line for line in file if line.startswith("flags")).split()
        return {OF_LINUX.get(flag, flag) for flag in flags}
    except (OSError, StopIteration):
        import llvmlite.binding as llvm

        return {name for name, has in llvm.get_host_cpu_features().items() if has}


def _directories() -> Iterator[Path]:
    """Where machine code may be, the first first."""
    yield BESIDE
    from bridge.core.output.cache import directory

    try:
        yield directory("kernels")
    except RuntimeError:  # a user without a home directory
        return


def _why_unusable(directory: Path) -> str:
    """Why nothing of a directory is loaded, "" if it may be.

    Who may write beside the kernels may write them, too, and who may write beside their directory may replace it.
    """
    return "" if directory == BESIDE else _why_open(directory) or _why_open(directory.parent)


def _why_open(directory: Path) -> str:
    """Why others may write a directory, after it was closed to them, if it is this user's; "" if they may not."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o022:
        with suppress(OSError):
            directory.chmod(0o700)
    return _why_untrusted(directory)


def _why_untrusted(path: Path) -> str:
    from bridge.core.output.cache import why_untrusted

    return why_untrusted(path)


def _is_writable(directory: Path) -> bool:
    try:
        if directory == BESIDE:
            directory.mkdir(exist_ok=True)
        else:
            from bridge.core.output.cache import make_directory

            make_directory(directory)
    except OSError:
        return False
    return not _why_unusable(directory) and os.access(directory, os.W_OK)


def _compiled(module: str, directory: Path, linked: bool) -> Path:
    """Compile a file in a process of its own, which imports what this one does, and nothing of its directory."""
    import subprocess  # 7 ms with what it imports

    from bridge.core.errors import CannotRun

    what = f"the kernels of {module}.py cannot be compiled for this processor ({level()})"
    if getattr(sys, "frozen", False):
        raise CannotRun(f"{what} in a frozen application; run `python -m bridge._kernels.build` before it is frozen")
    _say_once()
    command = [sys.executable, "-P", "-m", "bridge._kernels.build", module]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in map(str, sys.path) if path and os.pathsep not in path)
    options = ["--level", level(), "--out", str(directory), *([] if linked else ["--unlinked"])]
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=env)
    made = None if run.returncode else _found(module, directory, linked)
    if made is None:
        last = run.stderr.strip().rpartition("\n")[2] or "its result is not there"
        raise CannotRun(f"{what}: {last}; try it yourself: {' '.join(command)}")
    return made


@cache
def _say_again(reasons: str) -> None:
    from bridge.core.errors import warn

    warn(
        f"kernels are compiled again in every process, some seconds for each file: {reasons}; set XDG_CACHE_HOME to "
        "one that only you can write"
    )


@cache
def _say_once() -> None:
    from bridge.core.errors import warn

    warn(
        f"kernels are compiled for this processor ({level()}), about ten seconds for each of their files that is used; "
        "`python -m bridge._kernels.build` compiles all of them"
    )
