"""Join the processes of `torchrun` or Ray that share a calibration.

They meet over gloo in host memory, on a GPU too: statistics of a block are a few MB. At every meeting each tells first
whether it failed, so that an error of one ends all with the same message.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from bridge.core import errors
from bridge.core.errors import BridgeError, BridgeWarning, CalibrationError, UsageError, first_line, notes_of
from bridge.core.output.directory import can_go_on

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
JOIN = timedelta(minutes=5)  # until all processes have called the verb
# For one to wait for another: rank 0 writes and verifies a whole model meanwhile. A process that dies is noticed at
# once, because its connection closes; a machine that vanishes by torchrun's or Ray's own watch.
PATIENCE = timedelta(hours=12)
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the environment that torchrun gives a process
T = TypeVar("T")


def launched() -> tuple[int, int]:
    """Return the rank of this process and how many were started together, (0, 1) for one; loads no framework."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size, *address = (os.environ.get(name, "") for name in LAUNCHED)
    if rank.isdecimal() and size.isdecimal() and all(address):
        return int(rank), int(size)
    return 0, 1


@contextmanager
def joined(workers: int | None = None) -> Iterator[Workers | None]:
    """Yield the processes that run the same block, None if this one is alone; an error of one ends all.

    `workers`: how many the caller expects; None for all that were started together, 1 for this process alone.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers={workers!r}: how many processes share the batches is a whole number, 1 or more")
    rank, size = launched()
    if workers not in (None, 1, size):
        raise UsageError(
            f"workers={workers}, but {size} of this run; start as many with `torchrun --nproc-per-node {workers}`, or "
            "leave workers out"
        )
    if size == 1 or workers == 1:
        yield None
        return
    group = _join(rank, size)
    try:
        with warnings.catch_warnings():
            if rank:
                warnings.simplefilter("ignore", BridgeWarning)  # rank 0 prints it
            yield group
    except Exception as error:
        group.raise_everywhere(error)
    finally:
        group.close()


def check_same(workers: Workers, arguments: Mapping[str, str]) -> None:
    """UsageError if another process was given other arguments."""
    everyone = workers.agree(dict(arguments))
    for rank, theirs in enumerate(everyone):
        if other := [name for name, value in theirs.items() if value != everyone[0][name]]:
            why = "; give all of them all batches: each takes its share itself" if "data" in other else ""
            raise UsageError(f"worker {rank} of {workers.size} has another {', '.join(other)} than worker 0{why}")


def check_shared(workers: Workers | None, seen: Any, place: Path) -> None:
    """UsageError if processes see different things on the disk; a meeting. `seen`: of a kind that JSON holds."""
    if workers and any(other != seen for other in workers.agree(seen)):
        raise UsageError(f"{place}: the processes see different files there; give a disk that all of them share")


def _join(rank: int, size: int) -> Workers:
    """Wait for all processes; make a process group if the caller has none."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    own = not distributed.is_initialized()
    made: list[Any] = []
    try:
        if own:
            store = _store()
            turn = store.add(f"bridge/turn of {rank}", 1)  # keys of an earlier verb stay in the store
            own_keys = distributed_c10d.PrefixStore(f"bridge/{turn}", store)
            distributed.init_process_group("gloo", store=own_keys, rank=rank, world_size=size, timeout=JOIN)
        else:
            made.append(distributed.new_group(backend="gloo", timeout=JOIN))
        made.append(distributed.new_group(backend="gloo", timeout=PATIENCE))
    except (RuntimeError, ValueError) as error:
        _leave(made, own)
        raise UsageError(
            f"process {rank} of {size} waited {JOIN.total_seconds():g} seconds for the others ({first_line(error)}); "
            "call this verb in all of them with the same arguments, or pass workers=1 to run in this process alone"
        ) from error
    return Workers(rank, size, made, own)


@cache
def _store() -> Any:
    """Connect to the store of this run, which rank 0 or torchrun serves.

    It stays until the process ends: one that comes early for the next verb would reach a server about to close.
    """
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", timeout=JOIN))[0]


def _leave(groups: Sequence[Any], own: bool) -> None:
    from torch import distributed

    with suppress(RuntimeError, ValueError, AssertionError):
        for group in groups:
            distributed.destroy_process_group(group)
        if own:
            distributed.destroy_process_group()


def share_of(items: Sequence[T], workers: Workers | None) -> list[tuple[int, T]]:
    """Return the items that this process runs, with their positions."""
    return workers.share(items) if workers else [*enumerate(items)]


@dataclass(frozen=True)
class Workers:
    """The processes that share a calibration. `rank`: of this one, 0 for the one that writes and prints."""

    rank: int
    size: int
    _groups: Sequence[Any]
    _own: bool

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Return the part of items that this process runs, with their positions; parts follow the ranks."""
        begin, end = (-(-rank * len(items) // self.size) for rank in (self.rank, self.rank + 1))
        return list(enumerate(items))[begin:end]

    def agree(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank, of a kind that JSON holds; a meeting."""
        messages = self._meet({"value": value})
        for rank, theirs in enumerate(messages):
            if "error" in theirs:
                # work that the failed process can continue is kept here, too
                why = TimeoutError() if theirs["error"]["kept"] else None
                raise _Elsewhere(self._error_of(rank, theirs["error"])) from why
        return [theirs["value"] for theirs in messages]

    def exchange(self, tensors: Tensors) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of each process, by rank, on the CPU; a meeting. All of them must be taken."""
        import torch
        from torch import distributed

        heads = self.agree([(name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items()])
        for rank, head in enumerate(heads):
            layout = [(name, getattr(torch, dtype.removeprefix("torch.")), shape) for name, dtype, shape in head]
            sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for _, dtype, shape in layout]
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            if rank == self.rank and data.numel():
                torch.cat([_bytes(tensor) for tensor in tensors.values()], out=data)
            if data.numel():
                with self._reached():
                    distributed.broadcast(data, src=rank, group=self._groups[-1])
            parts = zip(layout, torch.split(data, sizes), strict=True)
            yield {name: part.clone().view(dtype).reshape(shape) for (name, dtype, shape), part in parts}

    def neighbours(self) -> list[int]:
        """Return the ranks on this machine."""
        hosts = self.agree(socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def own_directory(self, directory: Path) -> Path:
        """Return the directory of this process for one that all were given, on one machine perhaps."""
        return directory.with_name(f"{directory.name}.{self.rank}") if self.rank else directory

    def raise_everywhere(self, error: Exception) -> NoReturn:
        """Send an error to all processes, and raise the same one in each: that of the lowest rank."""
        if isinstance(error, _Elsewhere):
            raise error.error from None
        message = {"kind": type(error).__name__, "text": str(error), "notes": notes_of(error), "kept": can_go_on(error)}
        messages: list[Any] = []
        with suppress(CalibrationError):  # another is gone, and cannot print it
            messages = self._meet({"error": message})
        rank = next((rank for rank, theirs in enumerate(messages) if "error" in theirs), self.rank)
        if rank != self.rank:
            raise self._error_of(rank, messages[rank]["error"]) from error
        if isinstance(error, BridgeError):
            error.reported_elsewhere = bool(messages) and self.rank != 0
        raise error

    def close(self) -> None:
        """Leave; the caller's own process group stays."""
        _leave(self._groups, self._own)

    def _meet(self, message: Mapping[str, Any]) -> list[Any]:
        """Send a message to all, and return theirs by rank."""
        import torch

        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = zip(self._gather(padded), sizes, strict=True)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in parts]

    def _error_of(self, rank: int, message: Mapping[str, Any]) -> BridgeError:
        kind = getattr(errors, str(message["kind"]), None)
        if isinstance(kind, type) and issubclass(kind, BridgeError):
            error = kind(message["text"])
        else:
            error = CalibrationError(f"unexpected {message['kind']}: {message['text']}")
        for note in [*message["notes"], f"in worker {rank} of {self.size}"]:
            error.add_note(note)
        error.reported_elsewhere = self.rank != 0
        return error

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch
        from torch import distributed

        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._reached():
            distributed.all_gather(gathered, tensor, group=self._groups[-1])
        return gathered

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CalibrationError(
                f"worker {self.rank} of {self.size} lost another one, which was killed or did not answer within "
                f"{PATIENCE} hours ({first_line(error)}); its own output may say why: run the same command again"
            ) from TimeoutError(str(error))  # what is done is kept, as when a server does not answer


class _Elsewhere(Exception):
    """Carries the error of another process out of a meeting."""

    def __init__(self, error: BridgeError) -> None:
        super().__init__(str(error))
        self.error = error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
