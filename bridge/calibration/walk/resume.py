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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bridge.calibration.job import CalibrationJob
from bridge.calibration.statistics import KINDS, MATRICES, WATCHED, Statistics, merge
from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.forwards import outputs_of
from bridge.calibration.walk.model import WalkModel
from bridge.calibration.walk.offloaded import to_device
from bridge.calibration.walk.states import written
from bridge.calibration.walk.streams import Streams
from bridge.calibration.walk.weights import drop
from bridge.calibration.walk.workers.processes import Workers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import BridgeError, warn
from bridge.core.files.matrices import AppendedFile, FileMatrix
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes, layout
from bridge.core.output.directory import Work, partial_directory
from bridge.core.output.journal import begin
from bridge.core.output.temporary import write_whole
from bridge.core.values import TensorSpec
from bridge.core.version import __version__, installed
from bridge.sources.live_models.loading import as_tensor

PIECE = 16 << 20  # bytes of codes that are read at once
_PLAIN = (bool, int, float, str, type(None))
# reading what was kept failed, or the model did not take it
_DAMAGED = (BridgeError, OSError, KeyError, ValueError, RuntimeError, TypeError, IndexError)


class _CannotKeep(Exception):
    """A value between blocks that has no form on disk."""


def identity_of(job: CalibrationJob) -> str:
    """Return the digest of all that decides the activations and statistics of a walk."""
    versions = [installed(name) for name in ("nvidia-modelopt", "torch", "transformers")]
    held = hashlib.sha256()
    for part in _content([dict(sorted(batch.items())) for batch in job.data.held_out]):
        held.update(part)
    parts = (
        __version__,
        job.source.fingerprint,
        job.scheme.digest,
        job.data.digest,
        held.hexdigest(),
        job.source.runs_in,
        versions,
        torch.get_num_threads(),
        job.device or "cpu",
        *((job.workers.rank, job.workers.size) if job.workers else ()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def unfinished(job: CalibrationJob) -> Iterator[Partial | None]:
    """Yield what an unfinished walk of the same job left in its directory `partial`; None without one."""
    if job.partial is None:
        yield None
        return
    with partial_directory(job.partial, identity_of(job)) as work:
        yield Partial(work)


class WalkJournal:
    """Continues a walk after the blocks that an earlier run finished, and keeps those that this one finishes.

    `partial`: where; None keeps nothing but the codes that blocks choose, in a file without a name.
    """

    def __init__(self, partial: Partial | None, model: WalkModel, streams: Streams, workers: Workers | None) -> None:
        self._partial, self._model, self._streams, self._workers = partial, model, streams, workers
        self._codes: AppendedFile | None = None

    def resume(self, seen: Statistics, visited: set[Block]) -> bool:
        """Add what an earlier run finished to `seen` and `visited`.

        False if the walk, here or in another process, must start again.
        """
        partial = self._partial
        if partial is None:
            return True
        least = min(self._workers.agree(len(partial.blocks))) if self._workers else len(partial.blocks)
        resumed = partial.back_to(least) and (not partial.blocks or self._resumed(partial, seen, visited))
        resumed = all(self._workers.agree(resumed)) if self._workers else resumed
        if resumed and partial.blocks:
            done, last = len(partial.blocks), partial.blocks[-1]
            warn(f"the calibration continues after block {done} of {len(self._model.blocks)}, {last}")
        return resumed

    def _resumed(self, partial: Partial, seen: Statistics, visited: set[Block]) -> bool:
        """Let the forwards pass the blocks that an earlier run finished; False if they then wait with other inputs."""
        finished = {block for block in self._model.blocks if block.name in partial.blocks}
        try:
            self._pass_over(finished, partial)
            for one in partial.statistics():
                merge(seen, one)
        except _DAMAGED:
            return False
        visited |= finished
        self._streams.progress.skip(finished)
        return self._digest() == partial.next

    def _pass_over(self, finished: Set[Block], partial: Partial) -> None:
        """Look up what embeddings put out; for other blocks stands what the last of them put out."""
        model, streams = self._model, self._streams
        looked_up = {b for b in finished if b.name != partial.blocks[-1] and model.plain.is_embedding(b)}
        while waiting := [b for batch in streams.all if (b := batch.forward.block) in finished and b]:
            block = min(waiting, key=lambda block: block.order)
            if block in looked_up:
                modules = model.read_again(block)
                for batch, output in outputs_of(streams.waiting(streams.all, block), model.plain.modules[block.name]):
                    streams.go_on(batch, output)
                drop(modules)
                continue
            for at, batch in enumerate(streams.all):
                if batch.forward.block is block:
                    output = to_device(partial.output(at), model.device)
                    while batch.forward.block in finished - looked_up:
                        streams.go_on(batch, output)

    def keep(self, block: Block, seen: Statistics) -> None:
        """Write what a block gave, for a run that continues after this one was killed."""
        streams = self._streams
        if self._partial is None or any(batch.forward.block is None for batch in streams.all):
            return  # after the last block little is left to do
        digest, outputs = self._digest(), [batch.output for batch in streams.all]
        if not digest or not self._partial.keep(block, seen, outputs, digest, streams.release):
            self._partial = None  # the blocks before this one are kept
            streams.keeps_outputs = False

    def keep_codes(self, chosen: Statistics, seen: Statistics) -> None:
        """Write the codes and scales that a block chose to a file, and add their places to `seen`."""
        with written(self._partial.directory if self._partial else None, "chosen codes"):
            if self._codes is None and any(chosen[kind] for kind in MATRICES):
                self._codes = self._partial.codes if self._partial else AppendedFile()
            for kind in MATRICES:
                seen[kind] |= {module: self._codes.append(m) for module, m in chosen[kind].items() if self._codes}

    def _digest(self) -> str:
        """Return a digest of where forwards wait and what they hand to the block; "" if a value has none."""
        digest = hashlib.sha256()
        try:
            for forward in (batch.forward for batch in self._streams.all):
                if forward.block:
                    digest.update(forward.block.name.encode())
                    for part in _content((forward.args, forward.kwargs)):
                        digest.update(part)
                    self._streams.release(forward.args, forward.kwargs)
        except _CannotKeep:
            return ""
        return digest.hexdigest()


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
        states = "states-b.safetensors" if self._states == "states-a.safetensors" else "states-a.safetensors"
        kinds = [kind for kind in seen if kind not in MATRICES]
        arrays = {f"{kind}/{name}": array for kind in kinds for name, array in seen[kind].items()}
        codes = {f"{kind}/{name}": matrix for kind in MATRICES for name, matrix in seen[kind].items()}
        places = {name: (matrix.offset, *matrix.shape) for name, matrix in codes.items()}
        statistics = file_bytes(arrays)
        entry: dict[str, Any] = {"states": states, "next": digest, "statistics": hashlib.sha256(statistics).hexdigest()}
        with written(self.directory, "finished blocks"):
            write_whole(self._statistics(len(self.blocks)), statistics)
            _write(self.directory / states, tensors, {"outputs": shapes}, release)
            entry |= {"codes": places, "chosen": _codes_digest(codes.values())} if places else {}
            self._work.mark(block.name, entry)
        self.blocks.append(block.name)
        self._placed.append(places)
        self._states, self.next = states, digest
        return True

    def _statistics(self, number: int) -> Path:
        return self.directory / f"block-{number:05}.safetensors"

    def statistics(self) -> Iterable[Statistics]:
        """The statistics of each finished block; ValueError if a file has changed."""
        for number, block in enumerate(self.blocks):
            path = self._statistics(number)
            if hashlib.sha256(path.read_bytes()).hexdigest() != self._work.done[block]["statistics"]:
                raise ValueError(f"{path} has changed")
            file = SafetensorsFile(path)
            seen: Statistics = {kind: {} for kind in (*KINDS, WATCHED)}
            for name in file.specs:
                kind, _, module = name.partition("/")
                seen[kind][module] = file.read(name)
            codes = {name: self.codes.matrix(at, tuple(shape)) for name, (at, *shape) in self._placed[number].items()}
            if codes and _codes_digest(codes.values()) != self._work.done[block]["chosen"]:
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


def _codes_digest(matrices: Iterable[FileMatrix]) -> str:
    digest = hashlib.sha256()
    for matrix in matrices:
        step = max(1, PIECE // max(1, matrix.shape[1]))
        for row in range(0, matrix.shape[0], step):
            digest.update(matrix[row : row + step].data)
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
