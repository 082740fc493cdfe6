"""Keep on disk what a walk has finished.

A killed run goes on at the next block. When the forwards run again, embeddings are looked up, and the outputs of the
last finished block stand for those of all other blocks before it. The digest of what the next block is given proves
that nothing else was carried along; if it was, the run starts again: in a decoder that gets an encoder's states (T5,
BART), and where all layers get what a quantized projection puts out (Gemma 4). The journal has digests of statistics
and codes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bridge.calibration.data import Data
from bridge.calibration.statistics import KINDS, MATRICES, Statistics
from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.states import written
from bridge.calibration.walk.workers.processes import Workers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import BridgeError
from bridge.core.files.matrices import AppendedFile, FileMatrix
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes, layout
from bridge.core.output.directory import Work, partial_directory
from bridge.core.output.journal import begin
from bridge.core.output.temporary import write_whole
from bridge.core.values import TensorSpec
from bridge.core.version import __version__, installed
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.live_models.loading import as_tensor
from bridge.sources.source import Source

PIECE = 16 << 20  # bytes of codes that are read at once
_PLAIN = (bool, int, float, str, type(None))


class _CannotKeep(Exception):
    """A value between blocks that has no form on disk."""


def identity_of(source: Source, scheme: Scheme, data: Data, device: str, workers: Workers | None = None) -> str:
    """Return the digest of all that decides the activations and statistics of a walk."""
    versions = [installed(name) for name in ("nvidia-modelopt", "torch", "transformers")]
    held = hashlib.sha256()
    for part in _content([dict(sorted(batch.items())) for batch in data.held_out]):
        held.update(part)
    parts = (
        __version__,
        source.fingerprint,
        scheme.digest,
        data.digest,
        held.hexdigest(),
        source.runs_in,
        versions,
        torch.get_num_threads(),
        device,
        *((workers.rank, workers.size) if workers else ()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def kept(directory: Path | None, identity: str) -> Iterator[Partial | None]:
    """Yield what an unfinished walk left in `directory`; None without a directory."""
    if directory is None:
        yield None
        return
    with partial_directory(directory, identity) as work:
        yield Partial(work)


class Partial:
    """The finished blocks of a walk. `blocks`: their names, in the order in which they ran."""

    def __init__(self, work: Work) -> None:
        self._work, self.directory = work, work.directory
        self.blocks = [*work.done]
        last = work.done[self.blocks[-1]] if self.blocks else {}
        self._states, self.next = str(last.get("states", "")), str(last.get("next", ""))
        self._placed = [work.done[name].get("codes", {}) for name in self.blocks]

    def start_again(self) -> None:
        """Forget all blocks."""
        begin(self._work.journal, self.directory, self._work.identity)
        self.blocks, self._placed = [], []
        for name in ("codes", "_outputs"):
            self.__dict__.pop(name, None)

    @cached_property
    def codes(self) -> AppendedFile:
        """The file of codes and scales that were chosen, with those of the finished blocks."""
        ends = (offset + rows * width for codes in self._placed for offset, rows, width in codes.values())
        return AppendedFile(self.directory / "codes.bin", max(ends, default=0))

    def back_to(self, count: int) -> bool:
        """Forget a last block that another process did not finish; False if the states before it are gone."""
        if count < len(self.blocks) - 1 or count == 0:
            return count == len(self.blocks)
        self.blocks, self._placed = self.blocks[:count], self._placed[:count]
        last = self._work.done[self.blocks[-1]]
        self._states, self.next = str(last["states"]), str(last["next"])
        return True

    def keep(
        self,
        block: Block,
        seen: Statistics,
        outputs: Sequence[Any],
        digest: str,
        release: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> bool:
        """Write the statistics of a block and what it put out; False if these have no form on disk.

        The states of the block before are overwritten only when those of this one are in the journal. `release` is
        called for each tensor that is written.
        """
        tensors: list[torch.Tensor] = []
        if block.name in self.blocks:  # an embedding that two parts of the model call
            return False
        try:
            shapes = json.dumps([_flat(value, tensors) for value in outputs])
        except _CannotKeep:
            return False
        with written(self.directory, "finished blocks"):
            self._write(block, seen, tensors, shapes, digest, release)
        return True

    def _write(
        self,
        block: Block,
        seen: Statistics,
        tensors: Sequence[torch.Tensor],
        shapes: str,
        digest: str,
        release: Callable[[torch.Tensor], None],
    ) -> None:
        states = "states-b.safetensors" if self._states == "states-a.safetensors" else "states-a.safetensors"
        arrays = {
            f"{kind}/{name}": array for kind in KINDS if kind not in MATRICES for name, array in seen[kind].items()
        }
        codes = {f"{kind}/{name}": matrix for kind in MATRICES for name, matrix in seen[kind].items()}
        places = {name: (matrix.offset, *matrix.shape) for name, matrix in codes.items()}
        statistics = file_bytes(arrays)
        write_whole(self._statistics(len(self.blocks)), statistics)
        _write(self.directory / states, tensors, {"outputs": shapes}, release)
        told: dict[str, Any] = {"states": states, "next": digest, "statistics": hashlib.sha256(statistics).hexdigest()}
        told |= {"codes": places, "chosen": _digest(codes.values())} if places else {}
        self._work.mark(block.name, told)
        self.blocks.append(block.name)
        self._placed.append(places)
        self._states, self.next = states, digest

    def _statistics(self, number: int) -> Path:
        return self.directory / f"block-{number:05}.safetensors"

    def statistics(self) -> Iterable[Statistics]:
        """The statistics of each finished block; ValueError if a file has changed."""
        for number, block in enumerate(self.blocks):
            path = self._statistics(number)
            if hashlib.sha256(path.read_bytes()).hexdigest() != self._work.done[block]["statistics"]:
                raise ValueError(f"{path} has changed")
            file = SafetensorsFile(path)
            seen: Statistics = {kind: {} for kind in KINDS}
            for name in file.specs:
                kind, _, module = name.partition("/")
                seen[kind][module] = file.read(name)
            codes = {name: self.codes.matrix(at, tuple(shape)) for name, (at, *shape) in self._placed[number].items()}
            if codes and _digest(codes.values()) != self._work.done[block]["chosen"]:
                raise ValueError(f"codes of {block} have changed")
            for name, matrix in codes.items():
                kind, _, module = name.partition("/")
                seen[kind][module] = matrix
            yield seen

    def output(self, forward: int) -> Any:
        """What the last finished block put out for a forward."""
        file, shapes = self._outputs

        def read(at: int) -> torch.Tensor:
            tensor: torch.Tensor = as_tensor(file.read(str(at)), file.specs[str(at)].dtype)
            return tensor

        return _unflat(shapes[forward], read)

    @cached_property
    def _outputs(self) -> tuple[SafetensorsFile, list[Any]]:
        file = SafetensorsFile(self.directory / self._states)
        return file, json.loads(file.header.metadata["outputs"])


def _digest(matrices: Iterable[FileMatrix]) -> str:
    digest = hashlib.sha256()
    for matrix in matrices:
        step = max(1, PIECE // max(1, matrix.shape[1]))
        for row in range(0, matrix.shape[0], step):
            digest.update(matrix[row : row + step].data)
    return digest.hexdigest()


def damaged(error: Exception) -> bool:
    """Whether reading what was kept failed, or the model did not take it."""
    return isinstance(error, BridgeError | OSError | KeyError | ValueError | RuntimeError | TypeError | IndexError)


def digest_of(waiting: Iterable[tuple[Block, tuple[Any, ...], Mapping[str, Any]]]) -> str:
    """Return a digest of where forwards wait and what they hand to the block; "" if that cannot be told."""
    digest = hashlib.sha256()
    try:
        for block, args, kwargs in waiting:
            digest.update(block.name.encode())
            for part in _content((args, kwargs)):
                digest.update(part)
    except _CannotKeep:
        return ""
    return digest.hexdigest()


def _content(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, torch.Tensor):
        yield repr((str(value.dtype), tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f" {key} ".encode()
            yield from _content(item)
    elif isinstance(value, tuple | list):
        yield f" {len(value)} ".encode()
        for item in value:
            yield from _content(item)
    elif isinstance(value, _PLAIN):
        yield f" {value!r} ".encode()
    else:
        raise _CannotKeep


def _flat(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return JSON that describes a value, whose tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_flat(item, tensors) for item in value]}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    raise _CannotKeep


def _unflat(shape: Mapping[str, Any], read: Callable[[int], torch.Tensor]) -> Any:
    (kind, content), *_ = shape.items()
    if kind == "tensor":
        return read(content)
    if kind == "plain":
        return content
    items = [_unflat(item, read) for item in content]
    return tuple(items) if kind == "tuple" else items


def _write(
    path: Path, tensors: Sequence[torch.Tensor], metadata: Mapping[str, str], release: Callable[[torch.Tensor], None]
) -> None:
    """Write a file tensor by tensor: they may be half of the memory."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    specs = [TensorSpec(str(at), tuple(t.shape), names[at]) for at, t in enumerate(tensors)]
    head, offsets, size = layout(specs, metadata)
    with path.open("wb") as file:
        file.write(head)
        for spec, tensor in zip(specs, tensors, strict=True):
            file.seek(offsets[spec.name])
            plain = tensor.detach().cpu().contiguous().view(getattr(torch, DTYPES[spec.dtype].storage))
            file.write(plain.numpy().data)
            release(tensor)
        file.truncate(size)
