"""Find and check the weight files of a Hugging Face directory.

Only their headers are checked.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from bridge.core.errors import collected
from bridge.core.files.handles import dead_link
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.weight_file import WeightFile
from bridge.core.parsing.limited import load_json
from bridge.core.text import named, natural
from bridge.core.values import LazyTensor, TensorSpec

if TYPE_CHECKING:
    import numpy as np

MAX_NAME = 255  # of a file name, on every system


class Shard(Protocol):
    """One weight file, or one tensor that is put together as it is read."""

    @property
    def path(self) -> Path: ...

    def read(self, name: str) -> np.ndarray: ...

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray: ...

    def offset(self, name: str) -> int: ...


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors and the files that hold them. `problems`: what does not fit together.

    `ignored`: tensors in these files that are not the model's -> why. `layout`: a digest of how tensors are made from
    those of the files, "" if they are the same. `dialect`: whose names the files have.
    """

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    holder: dict[str, Shard] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    dialect: str = "hf"

    def read(self, name: str) -> np.ndarray:
        return self.holder[name].read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        return self.holder[name].read_rows(name, begin, end, out)

    def lazy(self, name: str) -> LazyTensor:
        """Return one tensor, read on request."""
        return LazyTensor(self.specs[name], lambda: self.read(name))


@dataclass(frozen=True)
class _Choice:
    files: tuple[str, ...]
    weight_map: dict[str, str] | None
    problems: tuple[str, ...] = ()


def find_weights(root: Path, others: Container[str] = (), stem: str = "") -> Weights | None:
    """Read the headers of safetensors in `root`, else of `.bin`, else of files named in `others`; None without any.

    `stem`: what the names of files of both kinds begin with; "" for those of transformers.
    """
    names = sorted(path.name for path in root.iterdir() if path.is_file() or dead_link(path))
    stems = (stem, stem) if stem else ("model", "pytorch_model")
    choice = _choose(root, names, stems[0], "safetensors") or _choose(root, names, stems[1], "bin")
    choice = choice or _Choice(tuple(name for name in names if name in others), None)
    if not choice.files and not choice.problems:
        return None
    problems = list(choice.problems)
    shards: list[WeightFile] = []
    for name in choice.files:
        if name not in names and not (root / name).is_file():
            problems.append(f"{name}: missing, though the index names it; get it again")
            continue
        with collected(problems, str(root)):
            shards.append(open_weights(root / name))
    holder: dict[str, WeightFile] = {}
    for shard in shards:
        if twice := held_twice(shard, holder):
            problems.append(f"{shard.path.name}: {twice}")
        holder.update((name, shard) for name in shard.specs)
    if choice.weight_map is not None:
        problems += _against_index(choice.weight_map, root, shards)
    ordered = sorted(holder, key=natural)
    specs = {name: holder[name].specs[name] for name in ordered}
    files = tuple(root / name for name in choice.files)
    return Weights(specs, {name: holder[name] for name in ordered}, files, tuple(problems))


def open_weights(path: Path) -> WeightFile:
    """Read the header of a file of safetensors, or of torch."""
    if path.name.endswith(".safetensors"):
        return SafetensorsFile(path)
    from bridge.core.formats.torch_file import TorchFile  # its readers of pickles are not needed for safetensors

    return TorchFile(path)


def held_twice(file: WeightFile, holder: Mapping[str, WeightFile]) -> str:
    """Say which tensors of `file` another file in `holder` has too; "" if none."""
    twice = [name for name in file.specs if name in holder]
    return f"holds {named(twice)}, which {holder[twice[0]].path.name} holds as well; remove one" if twice else ""


def _choose(root: Path, names: list[str], stem: str, suffix: str) -> _Choice | None:
    """Choose the files of the checkpoint as transformers does: by an index, else by file names."""
    single, index = f"{stem}.{suffix}", f"{stem}.{suffix}.index.json"
    numbered = [(name, m) for name in names if (m := re.fullmatch(rf"{stem}-(\d+)-of-(\d+)\.{suffix}", name))]
    if index in names:
        weight_map, problems = _read_index(root / index)
        if single in names and single not in weight_map.values():
            problems.append(f"{single} and {index} describe two checkpoints in one directory; keep one")
        return _Choice(tuple(sorted(set(weight_map.values()))), weight_map, tuple(problems))
    if numbered:
        files = [name for name, _ in numbered]
        problems = []
        if single in names:
            problems.append(f"{single} and {files[0]} are two checkpoints in one directory; keep one")
        totals = {int(m[2]) for _, m in numbered}
        want = {f"{stem}-{n:05}-of-{total:05}.{suffix}" for total in totals for n in range(1, total + 1)}
        absent = sorted(want - set(files)) if all(len(m[1]) == 5 for _, m in numbered) else []
        if absent:
            problems.append(f"{named(absent)}: missing, as the numbers of the others say; get them again")
        return _Choice(tuple(files), None, tuple(problems))
    if single in names:
        return _Choice((single,), None)
    # A directory holds many other .bin files: training arguments, optimizer states.
    if suffix == "bin" or stem != "model":
        return None
    others = [
        name for name in names if name.endswith(f".{suffix}") and not name.startswith(("adapter", "consolidated"))
    ]
    return _Choice(tuple(others), None) if others else None


def _read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        found = load_json(path)["weight_map"]
    except OSError as error:
        return {}, [f"{path.name}: cannot be read: {error.strerror}"]
    except (ValueError, KeyError, TypeError) as error:
        with path.open("rb") as file:
            head = file.read(100)
        why = f" ({error})" if isinstance(error, ValueError) else ""
        what = f"no JSON with a weight_map{why}; get it again"
        what = "a Git-LFS pointer; run `git lfs pull`" if b"git-lfs" in head else what
        return {}, [f"{path.name}: {what}"]
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return {}, [f"{path.name}: weight_map must map tensor names to file names"]
    inside = {value: PurePosixPath(value) for value in set(found.values())}
    if not all(path.parts for path in inside.values()):
        return {}, [f"{path.name}: weight_map must map tensor names to file names"]
    if elsewhere := sorted(value for value, at in inside.items() if at.is_absolute() or ".." in at.parts):
        what = f"names files by absolute paths or with '..': {named(elsewhere)}"
        return {}, [f"{path.name}: {what}; only files in its directory and below are read"]
    long = sorted(value[:MAX_NAME] for value, at in inside.items() if max(map(len, at.parts)) > MAX_NAME)
    if long or not found:
        what = f"names files that no directory has: {named(long)}..." if long else "weight_map is empty"
        return {}, [f"{path.name}: {what}; get it again"]
    return {name: str(inside[value]) for name, value in found.items()}, []


def _against_index(weight_map: dict[str, str], root: Path, shards: Iterable[WeightFile]) -> list[str]:
    problems = []
    promised: dict[str, set[str]] = {}
    for name, value in weight_map.items():
        promised.setdefault(value, set()).add(name)
    for shard in shards:
        file = shard.path.relative_to(root).as_posix()
        absent, extra = promised[file] - shard.specs.keys(), shard.specs.keys() - promised[file]
        if absent:
            problems.append(f"{file}: lacks {named(absent)}, which the index places there: they are not of one save")
        if extra:
            problems.append(
                f"{file}: holds {named(extra)}, which the index does not place there: they are not of one save"
            )
    return problems
