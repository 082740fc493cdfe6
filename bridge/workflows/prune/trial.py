"""Run candidates of a search, and measure what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.calibration.data import Data
from bridge.core.errors import CalibrationError, warn
from bridge.core.text import not_finite, number
from bridge.planning.structure import structure_of
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.scores import Scores
from bridge.sources.pruned.source import PrunedSource
from bridge.verification.finite import first_not_finite
from bridge.workflows.prune.sizes import Keep

if TYPE_CHECKING:
    from bridge.calibration.importance.measure import Measured

# Differences of loss between two sizes of tiny-llama spread by 1.3 to 1.5 nats a token: 2,000 tokens tell costs apart
# that differ by 0.03 nats, 3 % of perplexity. Without samples= a search has 10,000.
SPREAD, FEW = 1.4, 2000


class Trial:
    """Makes smaller models of one, scored on half of the data, and measures their loss on the other half.

    `perplexity`: of the whole model there, on `tokens` predicted tokens, padding not counted.
    """

    def __init__(self, whole: Cut, data: Data, importance: str, repair: bool, device: str | None) -> None:
        self._whole, self._data = whole, data
        self._scoring, self._measuring = split(data)
        self._importance, self._repair, self._device = importance, repair, device
        self._scores: Scores | None = None
        self._every, self._given = whole, False
        self.perplexity = math.nan
        self.tokens = sum(int(_predicted(batch)) for batch in self._measuring.held_out)

    def warn_of_few(self) -> None:
        """Warn if costs that are close cannot be told apart."""
        if 0 < self.tokens < FEW:
            warn(
                f"each size is judged by {number(self.tokens, 'token')}, of which costs are uncertain by "
                f"{SPREAD / math.sqrt(self.tokens):.2f} nats: the choice between close ones is chance; give more "
                f"samples= (--samples), a longer sequence= (--sequence), or more data, for {FEW:,} tokens"
            )

    def check_enough(self, largest: Keep) -> None:
        """Refuse data that are too few to repair a model of these sizes, of which each needs more than smaller ones."""
        from bridge.calibration.importance.measure import check_enough

        check_enough(replace(self._whole, after={**self._whole.before, **largest}), self._scoring, 2)

    def prepare(self, given: Scores | None, dims: Iterable[str]) -> None:
        """Measure the whole model, and score all dims in one run, unless every cut is scored and repaired by itself."""
        from bridge.calibration.importance.measure import check_blocks_finite, perplexity_of
        from bridge.sources.pruned.weight_scores import weight_scores

        whole, perplexity = self._whole, None
        self._every = replace(whole, after={**whole.before, **{dim: whole.before[dim] - 1 for dim in dims}})
        self._scores, self._given = given, given is not None or self._importance == "weights"
        if given is None and self._importance == "weights":
            self._scores = Scores(weight_scores(self._every), "weights", whole.source.fingerprint)
        elif given is None and not self._repair:
            made = self._measured(self._every, replace(self._scoring, held_out=self._measuring.held_out))
            self._scores, perplexity = self._scores_of(made), made.perplexity
        if perplexity is None:
            perplexity = perplexity_of(whole.source, structure_of(whole.source), self._measuring, self._device)
        if perplexity is None or not math.isfinite(perplexity):
            if name := first_not_finite(whole.source):
                raise not_finite(name)
            check_blocks_finite(whole.source, structure_of(whole.source), self._measuring, self._device)
            raise CalibrationError(
                f"{whole.source.where} predicts no next token on the data, so that no size has a measured cost"
            )
        self.perplexity = perplexity

    def _measured(self, cut: Cut, data: Data) -> Measured:
        """Run the whole model for the scores of a cut, and repair that."""
        from bridge.calibration.importance.measure import measure_scores

        return measure_scores(
            cut, structure_of(cut.source), data, importance=self._importance, repair=self._repair, device=self._device
        )

    def _scores_of(self, made: Measured) -> Scores:
        return Scores(made.scores, self._importance, self._whole.source.fingerprint, self._data.digest)

    def model(self, keep: Keep) -> PrunedSource:
        """The smaller model; a repair takes a run."""
        cut = self._whole.to(keep)
        if self._scores:
            return cut.pruned(self._scores.scores)
        made = self._measured(cut, replace(self._scoring, held_out=()))
        return cut.pruned(made.scores, repaired=made.repaired)

    def result(self, keep: Keep) -> tuple[PrunedSource, Scores | None]:
        """The smaller model as `pruned` makes it, with all rows of the data, and its scores; None after a repair."""
        if self._given:
            return self.model(keep), self._scores
        cut = self._whole.to(keep)
        from bridge.verification.change import measure_change

        made = self._measured(cut if self._repair else self._every, replace(self._data, held_out=()))
        smaller = cut.pruned(made.scores, repaired=made.repaired)
        scores = None if self._repair else self._scores_of(made)
        measure_change(smaller, self._data, self._device)
        return smaller, scores

    def cost(self, keep: Keep) -> float:
        """The rise of the next-token loss, nats a token; infinite if the smaller model gives no number."""
        from bridge.calibration.importance.measure import perplexity_of

        smaller = self.model(keep)
        after = perplexity_of(smaller, structure_of(smaller), self._measuring, self._device)
        return math.inf if after is None else math.log(after) - math.log(self.perplexity)

    def loss(self, cost: float) -> float:
        """The perplexity at a cost."""
        return self.perplexity * math.exp(min(cost, 700.0))


def split(data: Data) -> tuple[Data, Data]:
    """The batches that score, and every second one with those held out, which measure."""
    if not data.batches:
        raise CalibrationError(f"a search needs data to run the model on: {data.missing or 'a forward_loop has none'}")
    measuring = (*data.batches[1::2], *data.held_out)
    return replace(data, batches=data.batches[::2]), replace(data, batches=(), held_out=measuring)


def _predicted(batch: Mapping[str, object]) -> int:
    """The tokens of a batch that have one before them, as the loss counts them."""
    from bridge.calibration.reference_outputs import as_arrays

    (arrays,) = as_arrays((batch,))
    ids, mask = arrays.get("input_ids"), arrays.get("attention_mask")
    if ids is None:
        return 0
    return int((mask[:, 1:] * mask[:, :-1]).sum()) if mask is not None and mask.ndim == 2 else ids[:, 1:].size
