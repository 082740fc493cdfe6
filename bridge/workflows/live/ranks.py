"""The ranks of a trainer, each with a part of one model.

They meet over gloo in host memory, and wait for each other no longer than they were told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np

from bridge.calibration.walk.workers.processes import Workers
from bridge.core.errors import BridgeError, CalibrationError, LiveError
from bridge.quant.codec.arrays import Array

_ABSENT = re.compile(r"Ranks? ([\d, ]+) failed to pass")  # of gloo's message on rank 0


def held_by_gather(sizes: Sequence[int]) -> int:
    """Bytes that `Ranks.gather` holds at most, with those that it is given."""
    received = len(sizes) if sum(map(bool, sizes)) > 1 else 0
    return (received + 3) * (max(sizes) + 1)


class Ranks:
    """All ranks of the default process group. `received`: bytes of weights that came from other ranks so far."""

    def __init__(self, timeout: float) -> None:
        from torch import distributed

        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.received = 0
        self._timeout = timedelta(seconds=timeout)
        with self._reached("bridge.tensors"):
            self._group = distributed.new_group(backend="gloo", timeout=self._timeout)
        self._meeting = Workers(self.rank, self.size, [self._group], False)

    def agree(self, value: Any, what: str) -> None:
        """Meet, and compare what all ranks have; LiveError if it is not the same everywhere.

        `value`: a mapping of a kind that JSON holds, by what its entries are in words. `what`: where the ranks are.
        """
        everyone = self.everyone(value, what)
        for rank, theirs in enumerate(everyone):
            if other := [name for name in value if theirs[name] != everyone[0][name]]:
                raise LiveError(
                    f"{what}: rank {rank} has another {' and '.join(other)} than rank 0; give all ranks the same model "
                    "and arguments"
                )

    def everyone(self, value: Any, what: str) -> list[Any]:
        """Meet, and return what each rank has, by rank, of a kind that JSON holds."""
        from torch import distributed

        with self._reached(what):
            distributed.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
            return self._meet(value)

    def fail(self, error: Exception, what: str) -> NoReturn:
        """Tell the others of an error while they `agree`, and raise it; they raise the same."""
        from torch import distributed

        with self._reached(what):
            distributed.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
        self._meeting.raise_everywhere(error)  # outside: it may be a RuntimeError of this rank

    def gather(self, mine: Array, sizes: Sequence[int], error: Exception | None, what: str) -> list[Array]:
        """The bytes of all ranks, by rank; `sizes` of each. If one of them has an error instead, all raise it."""
        import torch
        from torch import distributed

        owners = [rank for rank, size in enumerate(sizes) if size]
        most = max(sizes)
        own = torch.zeros(most + 1, dtype=torch.uint8)  # the last byte says whether the rank failed
        own[: mine.size] = torch.from_numpy(mine)
        own[most] = error is not None
        every = [own] * self.size
        with self._reached(what):
            if len(owners) == 1:
                distributed.broadcast(own, src=owners[0], group=self._group)
                self.received += 0 if self.rank == owners[0] else own.nbytes
            else:
                every = [torch.empty_like(own) for _ in sizes]
                distributed.all_gather(every, own, group=self._group)
                self.received += own.nbytes * (self.size - 1)
        if any(bool(one[most]) for one in every):
            self._end(error, what)
        return [one[:size].numpy() for one, size in zip(every, sizes, strict=True)]

    def largest(self, values: Sequence[float], error: Exception | None, what: str) -> list[float]:
        """The largest of each value over all ranks, in one exchange; if one has an error instead, all raise it."""
        import torch
        from torch import distributed

        both = torch.from_numpy(np.array([float(error is not None), *values], np.float64))
        with self._reached(what):
            distributed.all_reduce(both, distributed.ReduceOp.MAX, group=self._group)
        self.received += both.nbytes
        failed, *most = both.tolist()
        if failed:
            self._end(error, what)
        return most

    def _end(self, error: Exception | None, what: str) -> NoReturn:
        """Raise the error of the rank that has one, on all."""
        if error is not None:
            self.fail(error, what)
        self.agree({}, what)
        raise AssertionError("a rank failed and did not say why")

    def _meet(self, value: Any) -> list[Any]:
        try:
            return self._meeting.agree(value)
        except Exception as error:
            if isinstance(elsewhere := getattr(error, "error", None), BridgeError):
                raise elsewhere from None
            raise

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        """LiveError if a rank does not come, or is lost."""
        try:
            yield
        except (RuntimeError, CalibrationError) as error:
            if isinstance(error, CalibrationError) and not isinstance(error.__cause__, TimeoutError):
                raise
            absent = _ABSENT.search(str(error))
            who = f"rank {absent[1]} did not come" if absent else "another one was lost or did not answer"
            raise LiveError(
                f"{what}: rank {self.rank} of {self.size} waited for the others, at most "
                f"{self._timeout.total_seconds():g} seconds (timeout=), and {who}; its own output may say why. Every "
                "rank calls bridge.tensors, and iterates to the end, the same number of times"
            ) from error
