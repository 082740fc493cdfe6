"""Measure what quantizing each unit does to the output of its block.

Memory holds one block. Each unit runs alone with the inputs that its block has in the unquantized model, and the output
is compared with that of the unquantized block. The head's outputs are logits. Of them only the distribution counts, so
its error is the KL divergence of the model's output, which nothing but the head changes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.reference_outputs import CHUNK, kl, unpadded
from bridge.calibration.statistics import FakeModel
from bridge.calibration.walk.toggles import Toggles, own_weights, turned_on
from bridge.tracker.tensors import tensors_in

ALL = ""  # in place of a unit's name: all units of a block together, KV cache included


@dataclass(frozen=True)
class BlockError:
    """How far an output y moves to q. `error`: sum |q - y|^2 / sum |y|^2; of the head, nats a token.

    `cosine`: of the angle between q and y.
    """

    error: float
    cosine: float


@dataclass(frozen=True)
class BlockErrors:
    """Errors by block and unit, `ALL` and the KV cache among them. `tokens`: those of the held-out inputs.

    `held`: bytes of the outputs that were compared at once.
    """

    errors: Mapping[tuple[str, str], BlockError]
    tokens: int
    held: int

    def of(self, unit: str) -> BlockError | None:
        """The sum over the blocks in which a unit has modules, and the least cosine; None if it has none."""
        found = [error for (_, name), error in self.errors.items() if name == unit]
        least = min((error.cosine for error in found), default=0.0)
        return BlockError(math.fsum(error.error for error in found), least) if found else None


class BlockProbe:
    """Runs the units of each block alone on the held-out inputs, after ModelOpt has calibrated the block."""

    def __init__(self, units: Mapping[str, Sequence[str]]) -> None:
        """`units`: name -> checkpoint modules."""
        self._units, self._head = units, ""
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._held = 0
        self._last: tuple[str, str] | None = None  # the head, while its forward goes on to the model's output

    @property
    def measured(self) -> BlockErrors:
        """What was measured."""
        errors = {key: sums.result(key[0] == self._head) for key, sums in self._sums.items()}
        if self._head:  # ALL of the head is its only unit
            errors |= {(block, ALL): error for (block, name), error in errors.items() if block == self._head}
        return BlockErrors(errors, max((sums.rows for sums in self._sums.values()), default=0), self._held)

    def ready(self, model: Any) -> None:
        """Look at a model before it is cut into blocks."""
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._head = next((name for name, module in model.named_modules() if head is not None and module is head), "")

    def prepare(self, root: Any, bindings: Sequence[QuantizerBinding]) -> None:
        """Give the part of a model that will be calibrated weights of its own where that changes them.

        Else it shares those of the unquantized block.
        """
        own_weights(root, {binding.module for binding in bindings if binding.format.changes_weights})

    def runner(self, block: str, plain: Mapping[str, Any], calibrated: FakeModel) -> Callable[..., Any]:
        """Return a function of a batch and a block's arguments that measures, and returns the plain block's output.

        Of the head it returns both outputs, one after the other: what the model does with logits (a scale, a soft cap)
        it does to each row. `finish` is then given what became of them. `plain`: the block's modules by live name.
        """
        found = calibrated.quantizers
        toggles = Toggles(calibrated.model, plain.__getitem__, found.bindings, found.attention, self._units)
        asked = {unit: [unit] for unit in toggles.modules}
        module, is_head = calibrated.model.get_submodule(block), block == self._head
        if not is_head and asked:
            asked[ALL] = [*asked]

        def run(batch: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
            given = _copied((args, kwargs))  # a block may change its inputs in place
            output = plain[block](*args, **kwargs)
            first = tensors_in(output)[0]  # the hidden states
            for unit, names in asked.items():
                again, words = _copied(given)
                with turned_on(toggles, [(toggles, names)]):
                    other = tensors_in(module(*again, **words))[0]
                self._held = max(self._held, first.nbytes + other.nbytes)
                if is_head:
                    self._last = block, unit
                    return torch.cat([first, other])
                self._sums.setdefault((block, unit), _Sums()).add(first, other, unpadded(first, batch))
            return output

        return run

    def finish(self, batch: Mapping[str, Any], result: Any) -> None:
        """Take the model's output for a batch."""
        if self._last:
            plain, other = result.chunk(2)
            rows, sums = unpadded(plain, batch), self._sums.setdefault(self._last, _Sums())
            sums.add(plain, other, rows)
            sums.nats += kl(plain, other, rows)


class _Sums:
    """Sums over the rows of all batches, in float64."""

    def __init__(self) -> None:
        self.rows, self.nats = 0, 0.0
        self._moved = self._plain = self._other = self._both = 0.0

    def add(self, plain: Any, other: Any, rows: Any) -> None:
        width = plain.shape[-1]
        plain, other = plain.reshape(-1, width), other.reshape(-1, width)
        for part in torch.split(rows.to(plain.device), max(1, CHUNK // width)):
            y, q = plain[part].double(), other[part].double()
            self._moved += float((q - y).square().sum())
            self._plain += float(y.square().sum())
            self._other += float(q.square().sum())
            self._both += float((q * y).sum())
        self.rows += len(rows)

    def result(self, head: bool) -> BlockError:
        if not math.isfinite(self._moved):  # the output holds NaN or infinity
            return BlockError(math.inf, 0.0)
        norms = math.sqrt(self._plain * self._other)
        cosine = self._both / norms if norms else float(not self._moved)
        if head:
            return BlockError(self.nats / max(self.rows, 1), cosine)
        return BlockError(self._moved / self._plain if self._plain else math.inf if self._moved else 0.0, cosine)


def _copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, value)
