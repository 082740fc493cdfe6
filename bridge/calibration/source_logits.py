"""Run a source model and keep what gives its logits again.

The logits of 4,088 positions over a vocabulary of 262,144 are 4.3 GB in float32, the inputs of the head 10 MB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bridge.calibration.reference_outputs import runner
from bridge.core.errors import CalibrationError

SCRATCH = 2 << 30  # bytes of logits in a file without a name, where the head alone does not give them
CLOSE = 1e-4  # of the largest logit: products of other shapes are summed in another order
Batch = Mapping[str, Any]


class Logits(Protocol):
    """The logits of a source for batches of token ids. `count`: the batches that it has."""

    @property
    def count(self) -> int: ...

    def piece(self, at: int, rows: slice) -> Any:
        """Those of some positions of a batch, whose rows are flattened."""


@dataclass(frozen=True)
class OfHead:
    """Logits that `head` and `finish` compute of the inputs of the head."""

    head: Callable[[Any], Any]
    finish: Callable[[Any], Any]
    hidden: Sequence[Any]

    @property
    def count(self) -> int:
        return len(self.hidden)

    def piece(self, at: int, rows: slice) -> Any:
        import torch

        with torch.no_grad():
            return self.finish(self.head(self.hidden[at][rows])).float()


class InFile:
    """Logits in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with this object
        self._places: list[tuple[int, int]] = []
        self._width, self._end = 0, 0

    @property
    def count(self) -> int:
        return len(self._places)

    def add(self, output: Any) -> bool:
        """Keep the logits of one more batch; False if the file is full."""
        self._width = int(output.shape[-1])
        array = output.float().numpy()
        if self._places and self._end + array.nbytes > SCRATCH:
            return False
        self._file.seek(self._end)
        self._file.write(memoryview(array).cast("B"))
        self._places.append((self._end, array.nbytes))
        self._end += array.nbytes
        return True

    def piece(self, at: int, rows: slice) -> Any:
        import torch

        begin, nbytes = self._places[at]
        first, last, _ = rows.indices(nbytes // (4 * self._width))
        self._file.seek(begin + first * 4 * self._width)
        part = np.frombuffer(bytearray(self._file.read((last - first) * 4 * self._width)), np.float32)
        return torch.from_numpy(part.reshape(-1, self._width))


def source_logits(model: Any, batches: Sequence[Batch], done: Callable[[int], object] = lambda _: None) -> Logits:
    """Run `model` on batches; CalibrationError if its outputs are not finite."""
    run, head = runner(model), getattr(model, "get_output_embeddings", lambda: None)()
    hidden: list[Any] = []
    finish, kept = None, InFile()
    with _inputs(head) as seen:
        for at, batch in enumerate(batches):
            seen.clear()
            output = run(batch)
            if at == 0:
                if not bool(output.isfinite().all()):
                    raise CalibrationError("the unquantized model gives NaN or infinity for the text it is compared on")
                finish = _finish(model, head, seen, output)
            if finish:
                hidden.append(seen[0].reshape(-1, seen[0].shape[-1]))
            elif not kept.add(output):
                break
            del output
            done(at + 1)
    return OfHead(head, finish, hidden) if finish and head else kept


@contextmanager
def _inputs(head: Any) -> Iterator[list[Any]]:
    """A list that gets what the head of a model reads."""
    seen: list[Any] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach())) if head else None
    try:
        yield seen
    finally:
        if hook:
            hook.remove()


def _finish(model: Any, head: Any, seen: list[Any], output: Any) -> Callable[[Any], Any] | None:
    """What a model makes of the output of its head; None if that is not known, so that logits are kept whole."""
    import torch

    if len(seen) != 1 or seen[0].shape[:-1] != output.shape[:-1]:
        return None
    rows = seen[0].reshape(-1, seen[0].shape[-1])[:64]
    want = output.reshape(-1, output.shape[-1])[:64].float()
    with torch.no_grad():
        plain = head(rows)
        for finish in _finishes(model.config):
            got = finish(plain).float().cpu()
            if got.shape == want.shape and float((got - want).abs().max()) <= CLOSE * float(want.abs().max()):
                return finish
    return None


def _finishes(config: Any) -> Iterator[Callable[[Any], Any]]:
    """What models do after their head: nothing, a soft cap, or a factor."""
    text = config.get_text_config()
    yield lambda logits: logits
    if cap := getattr(text, "final_logit_softcapping", None):
        yield lambda logits: (logits / cap).tanh() * cap
    if factor := getattr(text, "logit_scale", None):
        yield lambda logits: logits * factor
    if divisor := getattr(text, "logits_scaling", None):
        yield lambda logits: logits / divisor
