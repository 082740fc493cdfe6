"""What one case of an attack is, and what counts as survived; never forgives an exception that is not bridge's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from bridge.core.errors import BridgeError
from tests.fuzz.cage import Cage

Case = Mapping[str, bytes | None]  # file, relative to the target's folder -> its content; None: it is not there

REFUSED, READ = "refused", "read"
LONGEST = 20_000  # characters of a message: a screen or ten, never the file itself


@dataclass(frozen=True)
class Target:
    """Something that reads strangers' files.

    `make` writes a valid artefact into an empty folder; `cases` are changes to it. `read` is bridge's own; `agree`
    raises AssertionError unless what it returned is what another implementation reads. `main`: the file whose bytes
    the coverage-guided mode makes up; `within`: what bridge is given, where it is not the folder itself.
    """

    name: str
    make: Callable[[Path], object]
    cases: Callable[[Path], SearchStrategy[Case]]
    read: Callable[[Path], Any]
    agree: Callable[[Path, Any], None]
    main: str


def attack(target: Target, root: Path, case: Case, cage: Cage) -> str:
    """Read one case and judge what came of it; AssertionError where that is neither a clean error nor correct."""
    with _changed(root, case):
        size = sum(len(content) for content in case.values() if content)
        try:
            with cage.holds(size):
                found = target.read(root)
        except BridgeError as error:
            clean(error, root)
            return REFUSED
        target.agree(root, found)
        return READ


def clean(error: BridgeError, root: Path) -> None:
    """Hold an error to what a reader of it needs: it says which file, can be printed, and does not hide a failure."""
    message = str(error)
    files = [path.name for path in root.rglob("*") if path.is_file()]
    assert message.strip(), f"{type(error).__name__} without a message"
    assert any(name in message for name in (str(root), root.name, "mappings/", *files)), (
        f"names no file: {message[:500]}"
    )
    assert len(message) <= LONGEST, f"a message of {len(message)} characters: {message[:300]}"
    assert all(mark.isprintable() or mark == "\n" for mark in message), f"cannot be printed: {message[:500]!r}"
    assert "MemoryError" not in message, f"ran out of memory: {message[:500]}"


@contextmanager
def _changed(root: Path, case: Case) -> Iterator[None]:
    """Lay a case over the valid artefact, and take it away again."""
    before = {name: (root / name).read_bytes() if (root / name).is_file() else None for name in case}
    try:
        for name, content in case.items():
            _put(root / name, content)
        yield
    finally:
        for name, content in before.items():
            _put(root / name, content)


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def keep(root: Path, case: Case, into: Path) -> Path:
    """Copy the whole artefact with a case in it, so that it can be looked at."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(root, into)
    for name, content in case.items():
        _put(into / name, content)
    return into
