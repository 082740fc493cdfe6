"""Teachers: a running model, or its answers cached on disk.

A teacher whose answers are stored runs once over all rows and need not be loaded again. A row has the k most likely
ids of each token and their log-probabilities in float16, 260 bytes a token at k = 64. Shards of 64 rows are written
one by one and renamed, so that a killed run goes on with the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.errors import UsageError
from bridge.core.formats.safetensors import file_pieces
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import parse_json
from bridge.workflows.distill.batches import Rows
from bridge.workflows.distill.head import SplitModel, Trunk, chunks
from bridge.workflows.distill.losses import Answers

if TYPE_CHECKING:
    from torch import Tensor

HEADER = "teacher.json"
SHARD = 64  # rows
NARROW = 1 << 16  # ids below it are stored in two bytes


@dataclass(frozen=True)
class LiveReply:
    """Answers of a running model for some rows, computed on demand. Tokens are counted through all rows."""

    model: SplitModel
    trunk: Trunk
    ids: Tensor
    temperature: float
    top_k: int | None

    def answers(self, at: Tensor) -> Answers:
        """Log-probabilities for the tokens `at`."""
        import torch

        with torch.no_grad():
            hidden = self.trunk.last.flatten(0, 1)[at]
            logits = self.model.logits(self.trunk, hidden, self.ids[at])
        return Answers.of(logits, self.temperature, self.top_k)

    def hidden(self, layer: int | None) -> Tensor:
        """Hidden states (tokens, hidden) of a layer, None for those after the last norm."""
        hidden = self.trunk.last if layer is None else self.trunk.layer(layer)
        return hidden.flatten(0, 1)


@dataclass(frozen=True)
class LiveTeacher:
    """A model that runs at each step."""

    model: SplitModel
    rows: Rows
    temperature: float
    top_k: int | None
    layers: bool
    device: Any

    def reply(self, rows: Sequence[int]) -> LiveReply:
        import torch

        batch = self.rows.batch(rows, self.device)
        with torch.no_grad():
            trunk = self.model.trunk(batch, self.layers)
        return LiveReply(self.model, trunk, batch["input_ids"].flatten(), self.temperature, self.top_k)


@dataclass(frozen=True)
class CacheReply:
    """Stored answers for some rows: `index` and `logprob` (tokens, k)."""

    index: Tensor
    logprob: Tensor

    def answers(self, at: Tensor) -> Answers:
        return Answers(self.logprob[at].float(), self.index[at].long())


@dataclass(frozen=True)
class CachedTeacher:
    """The answers in a directory, for rows of which `length` are the tokens."""

    directory: Path
    length: int
    device: Any
    checked: set[Path] = field(default_factory=set)

    @cached_property
    def header(self) -> Mapping[str, Any]:
        return dict(parse_json((self.directory / HEADER).read_bytes()))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    def reply(self, rows: Sequence[int]) -> CacheReply:
        import torch
        from safetensors.numpy import safe_open

        parts: dict[str, list[np.ndarray]] = {"index": [], "logprob": []}
        for row in rows:
            path = shard_of(self.directory, row // SHARD)
            if path not in self.checked:
                check_shard(path)
                self.checked.add(path)
            with safe_open(path, "numpy") as shard:
                for name, found in parts.items():
                    found.append(shard.get_slice(name)[row % SHARD])
        index, logprob = (torch.from_numpy(np.concatenate(parts[name])) for name in ("index", "logprob"))
        return CacheReply(index.to(self.device), logprob.to(self.device))


Teacher = LiveTeacher | CachedTeacher
Reply = LiveReply | CacheReply


def shard_of(directory: Path, number: int) -> Path:
    return directory / f"rows-{number:05d}.safetensors"


def check_cache(directory: Path, expected: Mapping[str, Any]) -> None:
    """UsageError for a directory that holds something else than answers of this teacher on these rows."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory}: teacher_cache= (--teacher-cache) is a file; name a directory")
    path = directory / HEADER
    if not path.is_file():
        if any(directory.iterdir()):
            raise UsageError(
                f"{directory}: holds files and no {HEADER}, so it is not a cache of a teacher; name another directory"
            )
        return
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path}: damaged ({error}); remove {directory}, or name another directory") from error
    told = found if isinstance(found, dict) else {}
    if differs := [name for name, value in expected.items() if told.get(name) != value]:
        raise UsageError(
            f"{directory}: holds answers with another {', '.join(differs)}; remove it, or name another directory"
        )


def begin_cache(directory: Path, expected: Mapping[str, Any]) -> None:
    """Make the directory and its header."""
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / HEADER, (json.dumps(dict(expected), indent=2) + "\n").encode())


def missing_shards(directory: Path, wanted: Iterable[int]) -> list[int]:
    """The shards of wanted rows that are not there, by number."""
    numbers = sorted({row // SHARD for row in wanted})
    return [number for number in numbers if not shard_of(directory, number).is_file()]


def write_shard(directory: Path, teacher: LiveTeacher, rows: Rows, vocabulary: int, number: int) -> None:
    """Run the teacher over the rows of a shard."""
    parts = [
        _answered(teacher, row, rows.ids.shape[1], vocabulary)
        for row in range(number * SHARD, min((number + 1) * SHARD, len(rows.ids)))
    ]
    arrays = {name: np.stack([part[name] for part in parts]) for name in ("index", "logprob")}
    write_whole(shard_of(directory, number), file_pieces(arrays, {"sha256": _digest(arrays)}))


def check_shard(path: Path) -> None:
    """UsageError for a shard that is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, safe_open

    try:
        with safe_open(path, "numpy") as shard:
            told = (shard.metadata() or {}).get("sha256")
        whole = told == _digest(load_file(path))
    except (SafetensorError, OSError, KeyError):
        whole = False
    if not whole:
        raise UsageError(f"{path}: is damaged; remove this file, and the teacher runs over its rows again")


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in ("index", "logprob"):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _answered(teacher: LiveTeacher, row: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """The answers for one row: ids and log-probabilities (tokens, k)."""
    import torch

    reply = teacher.reply([row])
    found = [reply.answers(torch.arange(part.start, part.stop)) for part in chunks(length, vocabulary)]
    kind = np.uint16 if vocabulary <= NARROW else np.int32
    index = [answers.index.cpu().numpy().astype(kind) for answers in found if answers.index is not None]
    logprob = [answers.logprob.half().cpu().numpy() for answers in found]
    return {"index": np.concatenate(index), "logprob": np.concatenate(logprob)}
