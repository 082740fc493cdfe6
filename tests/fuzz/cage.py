"""Watches a process while it reads a hostile file: time, memory, files written, programs run; must never be left early.

Python's audit hooks see what the interpreter does on behalf of any code, ours and that of libraries; they cannot be
taken out again, so a cage is for a process of its own. Linux only: /proc tells how much memory a case took.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# A case may take this much processor time, and this much for each byte of its files: the unpickler runs an instruction
# a byte, some 0.3 us each, and several times that on a busy machine. Most cases take some milliseconds.
SECONDS, SECONDS_PER_BYTE = 5.0, 2e-6
# Seconds after which so many cases end the process, with its stacks: for what waits, and does not even compute.
WALL, TOGETHER = 300.0, 50
ROOM = 3 << 30  # bytes of addresses on top of what the process has: no bomb may take the machine down
# A case may take this much memory, and this much for each byte of its files: objects of Python are large.
LEAST, PER_BYTE = 64 << 20, 100
LOOSE = 6  # times as much of all that, while what the first cases import and compile is not the file's doing

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.putenv", "os.unsetenv", "os.kill", "shutil.move", "shutil.rmtree", "shutil.copyfile", "shutil.unpack_archive",
    "socket.connect", "socket.bind", "urllib.Request", "webbrowser.open", "ctypes.dlopen", "code.__new__",
    "tempfile.mkstemp", "tempfile.mkdtemp", "sys.addaudithook",
)  # fmt: skip


class TooSlow(BaseException):
    """Not an Exception: what catches everything must not take it for the file's fault."""


class Cage:
    """Armed once for a process; `holds` then watches one case.

    Until `tighten` it is loose: time and memory are bounded, more widely, and what else is done is not looked at.
    """

    def __init__(self, loose: bool = False) -> None:
        self.done: list[str] = []
        self.most = 0
        self._loose = LOOSE if loose else 1
        self._inside, self._count = False, 0
        self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._bound()
        faulthandler.enable()
        sys.dont_write_bytecode = True  # of a module that is imported inside: the interpreter writes it, not the reader
        signal.signal(signal.SIGPROF, _too_slow)
        sys.addaudithook(self._audit)

    @property
    def loose(self) -> bool:
        return self._loose > 1

    def tighten(self) -> None:
        """From here on cases import nothing, and are held to all of it."""
        self._loose, self.most = 1, 0
        self._bound()

    def _bound(self) -> None:
        soft = self._kilobytes(b"VmSize:") * 1024 + ROOM * self._loose
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))

    @contextmanager
    def holds(self, size: int) -> Iterator[None]:
        """Watch what runs inside, which was given files of `size` bytes; AssertionError where it went too far."""
        self.done.clear()
        os.write(self._reset, b"5")  # the peak counts from here
        before = self._kilobytes(b"VmHWM:")
        if self._count % TOGETHER == 0:
            faulthandler.dump_traceback_later(WALL, exit=True)
        self._count += 1
        seconds = (SECONDS + SECONDS_PER_BYTE * size) * self._loose
        signal.setitimer(signal.ITIMER_PROF, seconds)
        self._inside = True
        try:
            yield
        except TooSlow:
            raise AssertionError(f"took more than {seconds:g} s of processor time") from None
        finally:
            self._inside = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            taken = (self._kilobytes(b"VmHWM:") - before) * 1024
            self.most = max(self.most, taken)
            assert not self.done, f"did what reading never does: {'; '.join(self.done[:5])}"
            most = (LEAST + PER_BYTE * size) * self._loose
            assert taken <= most, (
                f"took {taken >> 20} MB for files of {size} bytes; at most {most >> 20} MB are allowed"
            )

    def _kilobytes(self, field: bytes) -> int:
        return int(os.pread(self._status, 1 << 14, 0).split(field, 1)[1].split(None, 1)[0])

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._inside or self.loose:
            return
        if event == "open":
            _, mode, flags = (*given, None, 0)[:3]
            if (isinstance(mode, str) and set(mode) & set("wxa+")) or (isinstance(flags, int) and flags & _WRITES):
                self.done.append(f"open for writing {given[0]!r}"[:200])
        elif event in _FORBIDDEN:
            self.done.append(f"{event}{given!r}"[:200])


def _too_slow(number: int, frame: Any) -> NoReturn:
    raise TooSlow
