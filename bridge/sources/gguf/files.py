"""The file or files of one GGUF model, found and opened."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.core.errors import SourceError
from bridge.core.formats.gguf import GgufFile
from bridge.core.text import described, listed

ENDING = ".gguf"
MAX_PARTS = 99_999  # their numbers have five digits
_PART = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<count>\d{5})\.gguf")  # as llama-gguf-split names them


def open_files(path: Path) -> list[GgufFile]:
    """Open a file, or all parts of a split one, the first of which has the model's keys.

    `path`: a file, or a directory with one model; SourceError for missing parts, and for several models.
    """
    file = _one_of(path) if path.is_dir() else path
    files = [GgufFile(part) for part in _parts(file)]
    counts = {_whole(one, "split.count", 1) or 1 for one in files}
    if counts != {len(files)}:
        told = " and ".join(map(str, sorted(counts)))
        raise SourceError(
            f"{file}: says that it is one of {told} parts, and its name says {len(files)}; give the parts the names "
            f"that they had (name-00001-of-{max(counts):05d}.gguf, ...)"
        )
    for at, one in enumerate(files):
        if len(files) > 1 and (number := _whole(one, "split.no", 0)) != at:
            raise SourceError(
                f"{one.path}: is part {number + 1} by its key split.no, and {at + 1} by its name; give the parts the "
                "names that they had"
            )
    return files


def _whole(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= MAX_PARTS:
        raise SourceError(f"{file.path}: {key} is {described(value)}; it should be a whole number; get the file again")
    return value


def _parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if not match:
        return [file]
    count = int(match["count"])
    if not 1 <= int(match["at"]) <= count:
        raise SourceError(f"{file}: its name says part {int(match['at'])} of {count}; give it the name that it had")
    present = {path.name: path for path in file.parent.iterdir()}
    names = [f"{match['stem']}-{at:05d}-of-{match['count']}.gguf" for at in range(1, min(count, len(present) + 1) + 1)]
    if missing := [name for name in names if name not in present]:
        raise listed(str(file.parent), [f"{name}: missing, a part of the model; get it as well" for name in missing])
    return [present[name] for name in names]


def _one_of(root: Path) -> Path:
    """The one model of a directory, by the first part of a split one."""
    paths = sorted(path for path in root.iterdir() if path.name.endswith(ENDING) and path.is_file())
    firsts = {match["stem"] if (match := _PART.fullmatch(path.name)) else path.name: path for path in reversed(paths)}
    if len(firsts) != 1:
        names = ", ".join(path.name for path in sorted(firsts.values()))
        raise SourceError(f"{root}: has {len(firsts)} GGUF models ({names}); give the path of one file")
    return next(iter(firsts.values()))
