"""CPU cores and memory of this machine."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

_KEEPING = {M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: (1 << 31) - 1}
_RETURNING = {M_MMAP_THRESHOLD: 1 << 20, M_TRIM_THRESHOLD: 1 << 20}
_allocator = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}  # of this process; glibc cannot be asked
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the cores that this process may use: containers and schedulers may give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes that this process and its children may still take, of the machine or a smaller container."""
    free = [1 << 62]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max" where the container has no limit of its own
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free.append(max(most - used, 0))
    return min(free)


def keep_pages() -> None:
    """Let glibc reuse the memory of freed tensors in this process; without glibc nothing happens.

    By default it maps and zeros new pages for each of some hundred tensors: 11.6 instead of 6.7 s of system time for
    1.1 B parameters. Only the command line does this: a library does not set its caller's allocator.
    """
    _allocator.update(_KEEPING)
    _set_allocator(_KEEPING)


def collect_seldom() -> None:
    """Collect garbage after 50,000 new objects, not 700: nearly all that imports and plans make lives on.

    Only the command line does this, see `keep_pages`.
    """
    gc.set_threshold(50_000)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection for what makes many small objects that all live on.

    Collecting takes a fifth of tracing a model, and of planning 45,000 tensors; of importing torch and transformers a
    tenth.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def returning_pages() -> Iterator[None]:
    """Give the memory of freed tensors back to the system at once, for the block; without glibc nothing happens.

    glibc keeps it in a heap for each thread, which no other thread uses: with 130 paused forwards that hold 1.2 GB of
    activations 2.7 GB, and 1.3 GB with this. Afterwards it is as the command line set it, else as high as glibc's own
    thresholds rise.
    """
    _set_allocator(_RETURNING)
    try:
        yield
    finally:
        _set_allocator(_allocator)


def _set_allocator(options: Mapping[int, int]) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)


def drop_pages(address: int, count: int) -> None:
    """Take the pages of a shared mapping of a file out of this process; what was written to them stays in the file."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), mmap.MADV_DONTNEED)


def cached_share(files: Iterable[Path], looks: int = 64) -> float:
    """Return the share of files that is in the page cache, by single bytes that are there or not; waits for no disk.

    1 where the system cannot tell. A look makes Linux read what is not there, so no two calls look at the same places.
    """
    import random

    sizes = [(path, path.stat().st_size) for path in files]
    step, found = max(sum(nbytes for _, nbytes in sizes) // looks, 1), list[bool]()
    for path, nbytes in sizes:
        with contextlib.suppress(OSError, AttributeError), path.open("rb", buffering=0) as file:
            for at in range(random.randrange(min(step, nbytes) or 1), nbytes, step):
                found.append(_is_cached(file.fileno(), at))
    return sum(found) / len(found) if found else 1.0


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def in_memory(place: Path) -> bool:
    """Whether a directory lies on a file system without a disk."""
    with contextlib.suppress(OSError):
        device = place.stat().st_dev
        here = f" {os.major(device)}:{os.minor(device)} "
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return any(here in line and line.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs") for line in mounts)
    return False
