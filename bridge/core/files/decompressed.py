"""Decompress an archive into a file that the process removes.

Weights are read at any place and by several threads, which no compressed stream allows.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gzip
import os
import shutil
import tarfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from bridge.core.errors import SourceError, reason, warn
from bridge.core.files.handles import identity, opened
from bridge.core.output.temporary import temporary_directory

PIECE = 16 << 20  # bytes in memory at once
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # the end is missing, or bytes are others than were written
SPARE = 1 << 30  # bytes of the disk that a copy leaves free


def decompressed(path: Path) -> Path:
    """Return the decompressed copy of a gzip file, in the temporary directory (TMPDIR) until this process ends.

    It has the modification time of `path`, so that a later run goes on with the work of an earlier one.
    """
    with opened(path) as fd:
        mark = identity(fd)
    try:
        with gzip.open(path) as packed:  # before gigabytes of what is no archive are written
            tarfile.TarInfo.frombuf(packed.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except DAMAGED as error:
        raise SourceError(f"{path}: compressed, and cannot be decompressed ({error}); get it again") from error
    except tarfile.HeaderError as error:
        raise SourceError(f"{path}: compressed, and what is in it is not a tar archive ({error})") from error
    return _copy(path, mark)


@functools.cache  # several verbs on one archive share one copy
def _copy(path: Path, mark: tuple[int, int, int, int]) -> Path:
    held, owner = ExitStack(), os.getpid()
    folder = held.enter_context(temporary_directory())
    copy = folder / path.name
    try:
        with gzip.open(path) as packed, copy.open("wb") as file:
            while piece := packed.read(PIECE):
                if shutil.disk_usage(folder).free < SPARE + len(piece):
                    raise OSError(
                        errno.ENOSPC,
                        f"its decompressed copy leaves less than {SPARE >> 30} GiB free in {folder.parent}",
                    )
                file.write(piece)
        os.utime(copy, ns=(mark[3], mark[3]))
    except DAMAGED as error:
        held.close()
        raise SourceError(f"{path}: compressed, and cannot be decompressed ({error}); get it again") from error
    except OSError as error:
        held.close()
        full = "; set TMPDIR to a larger disk" * (error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        raise SourceError(f"{path}: compressed, and cannot be decompressed: {reason(error)}{full}") from error
    except BaseException:
        held.close()
        raise
    atexit.register(lambda: held.close() if os.getpid() == owner else None)
    warn(f"{path}: compressed; a copy of {copy.stat().st_size} bytes is in {folder} until this process ends")
    return copy
