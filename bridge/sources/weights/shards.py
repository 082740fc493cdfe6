"""The weight files of a Hugging Face directory: finds them and checks that they fit together, from headers only."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from bridge.container import SafetensorsFile
from bridge.errors import SourceError, first_of, fold_layers
from bridge.json_data import load_json
from bridge.sources.torch_zip import TorchFile
from bridge.values import TensorSpec

LONGEST_NAME = 255  # of a file, on every system
SHOWN = 8  # problems or names in one message; a checkpoint of Git-LFS pointers has hundreds of the same


class Shard(Protocol):
    """One weight file: specs from its header, tensors on request."""

    @property
    def path(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def read(self, name: str) -> np.ndarray: ...

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray: ...

    def offset(self, name: str) -> int: ...


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors and the files they lie in; `problems` is empty where everything fits.

    `ignored`: tensors in these files that are none of the model's -> why. `layout`: a digest of how tensors are made of
    those of the files, "" where they are the same. `dialect`: whose names the files have.
    """

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    holder: dict[str, Shard] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    dialect: str = "hf"


@dataclass(frozen=True)
class _Choice:
    files: tuple[str, ...]
    weight_map: dict[str, str] | None
    problems: tuple[str, ...] = ()


def find_weights(root: Path, others: Container[str] = ()) -> Weights | None:
    """Read the headers of the checkpoint in `root`: safetensors if there are any, else `.bin`, else files of `others`.

    None where there is none of them.
    """
    names = sorted(path.name for path in root.iterdir() if path.is_file())
    choice = _choose(root, names, "model", "safetensors") or _choose(root, names, "pytorch_model", "bin")
    choice = choice or _Choice(tuple(name for name in names if name in others), None)
    if not choice.files and not choice.problems:
        return None
    problems = list(choice.problems)
    shards: list[Shard] = []
    for name in choice.files:
        if name not in names and not (root / name).is_file():
            problems.append(f"{name}: missing, though the index names it; download it again")
            continue
        try:
            shards.append(SafetensorsFile(root / name) if name.endswith(".safetensors") else TorchFile(root / name))
        except SourceError as error:
            problems.append(str(error).removeprefix(f"{root}/"))
    holder: dict[str, Shard] = {}
    for shard in shards:
        twice = [name for name in shard.specs if name in holder]
        if twice:
            first = holder[twice[0]].path.name
            problems.append(f"{shard.path.name}: holds {named(twice)}, which {first} holds as well; remove one")
        holder.update((name, shard) for name in shard.specs)
    if choice.weight_map is not None:
        problems += _against_index(choice.weight_map, shards)
    ordered = sorted(holder, key=natural)
    specs = {name: holder[name].specs[name] for name in ordered}
    files = tuple(root / name for name in choice.files)
    return Weights(specs, {name: holder[name] for name in ordered}, files, tuple(problems))


def _choose(root: Path, names: list[str], stem: str, suffix: str) -> _Choice | None:
    """Say which files hold the checkpoint, as transformers does: an index decides, else file names."""
    single, index = f"{stem}.{suffix}", f"{stem}.{suffix}.index.json"
    numbered = [(name, m) for name in names if (m := re.fullmatch(rf"{stem}-(\d+)-of-(\d+)\.{suffix}", name))]
    if index in names:
        weight_map, problems = _read_index(root / index)
        if single in names and single not in weight_map.values():
            problems.append(f"{single} and {index} describe two checkpoints in one directory; keep one")
        return _Choice(tuple(sorted(set(weight_map.values()))), weight_map, tuple(problems))
    if numbered:
        files = [name for name, _ in numbered]
        problems = (
            [f"{single} and {files[0]} are two checkpoints in one directory; keep one"] if single in names else []
        )
        totals = {int(m[2]) for _, m in numbered}
        want = {f"{stem}-{n:05}-of-{total:05}.{suffix}" for total in totals for n in range(1, total + 1)}
        absent = sorted(want - set(files)) if all(len(m[1]) == 5 for _, m in numbered) else []
        if absent:
            problems.append(f"{named(absent)}: missing, as the numbers of the others say; download again")
        return _Choice(tuple(files), None, tuple(problems))
    if single in names:
        return _Choice((single,), None)
    if suffix == "bin":  # a directory holds many other .bin files: training arguments, optimizer states
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
        what = f"no JSON with a weight_map{why}; download it again"
        what = "a Git-LFS pointer; run `git lfs pull`" if b"git-lfs" in head else what
        return {}, [f"{path.name}: {what}"]
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return {}, [f"{path.name}: weight_map must map tensor names to file names"]
    outside = sorted({value for value in found.values() if Path(value).name != value or value in ("", ".", "..")})
    if outside:
        return {}, [f"{path.name}: names files outside its directory: {named(outside)}"]
    long = sorted({value[:LONGEST_NAME] for value in found.values() if len(value) > LONGEST_NAME})
    if long or not found:
        what = f"names files that no directory has: {named(long)}..." if long else "weight_map is empty"
        return {}, [f"{path.name}: {what}; download it again"]
    return found, []


def _against_index(weight_map: dict[str, str], shards: Iterable[Shard]) -> list[str]:
    """Compare index and shards in both directions."""
    problems = []
    promised: dict[str, set[str]] = {}
    for name, value in weight_map.items():
        promised.setdefault(value, set()).add(name)
    for shard in shards:
        file = shard.path.name
        absent, extra = promised[file] - shard.specs.keys(), shard.specs.keys() - promised[file]
        if absent:
            problems.append(f"{file}: lacks {named(absent)}, which the index places there; download it again")
        if extra:
            problems.append(f"{file}: holds {named(extra)}, which the index does not place there; rewrite the index")
    return problems


def named(names: Iterable[str]) -> str:
    """Return names for a message: sorted, layers folded, cut where they become too many."""
    return first_of(fold_layers(sorted(names, key=natural)), SHOWN)


def listed(where: str, problems: Iterable[str]) -> SourceError:
    """Return one error for all problems of the model at `where`."""
    found = list(problems)
    if len(found) == 1:
        return SourceError(f"{where}: {found[0]}")
    more = [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return SourceError("\n".join([f"{where}: {len(found)} problems", *(f"  {p}" for p in found[:SHOWN]), *more]))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: `layers.2` comes before `layers.10`."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 10 else (1, 0, part) for part in name.split(".")]
