"""Run candidates of a search, and measure what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bridge.calibration.data import Data
from bridge.core.errors import CalibrationError
from bridge.planning.structure import structure_of
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.scores import Scores
from bridge.sources.pruned.source import PrunedSource
from bridge.workflows.prune.ladders import Keep


class Trial:
    """Makes smaller models of one, and measures their loss on data that scored nothing.

    `perplexity`: of the whole model there, on `tokens` predicted tokens, padding not counted.
    """

    def __init__(
        self, whole: Cut, scoring: Data, measuring: Data, importance: str, repair: bool, device: str | None
    ) -> None:
        self._whole, self._scoring, self._measuring = whole, scoring, measuring
        self._importance, self._repair, self._device = importance, repair, device
        self._scores: Scores | None = None
        self.perplexity = math.nan
        self.tokens = sum(int(_predicted(batch)) for batch in measuring.held_out)

    def prepare(self, given: Scores | None, dims: Iterable[str]) -> Scores | None:
        """Score all dims in one run and measure the whole model; None if every cut is scored and repaired by itself."""
        from bridge.calibration.importance.measure import measure_scores, perplexity_of
        from bridge.sources.pruned.weight_scores import weight_scores

        whole = self._whole
        every = replace(whole, after={**whole.before, **{dim: whole.before[dim] - 1 for dim in dims}})
        self._scores, perplexity = given, None
        if given is None and self._importance == "weights":
            self._scores = Scores(weight_scores(every), "weights", whole.source.fingerprint)
        elif given is None and not self._repair:
            both = replace(self._scoring, held_out=self._measuring.held_out)
            made = measure_scores(
                every, structure_of(whole.source), both, importance=self._importance, device=self._device
            )
            fingerprint = whole.source.fingerprint
            self._scores, perplexity = Scores(made.scores, self._importance, fingerprint, both.digest), made.perplexity
        if perplexity is None:
            perplexity = perplexity_of(whole.source, structure_of(whole.source), self._measuring, self._device)
        if perplexity is None:
            raise CalibrationError(
                f"{whole.source.where} predicts no next token on the data, or NaN, so that no size has a measured cost"
            )
        self.perplexity = perplexity
        return self._scores

    def model(self, keep: Keep) -> PrunedSource:
        """The smaller model; a repair takes a run."""
        from bridge.calibration.importance.measure import measure_scores

        cut = self._whole.to(keep)
        if self._scores:
            return cut.pruned(self._scores.scores)
        made = measure_scores(
            cut, structure_of(cut.source), replace(self._scoring, held_out=()), importance=self._importance,
            repair=True, device=self._device,
        )  # fmt: skip
        return cut.pruned(made.scores, repaired=made.repaired)

    def cost(self, keep: Keep) -> float:
        """The rise of the next-token loss, nats a token; infinite if the smaller model gives no number."""
        from bridge.calibration.importance.measure import perplexity_of

        smaller = self.model(keep)
        after = perplexity_of(smaller, structure_of(smaller), self._measuring, self._device)
        return math.inf if after is None else math.log(after) - math.log(self.perplexity)

    def loss(self, cost: float) -> float:
        """The perplexity at a cost."""
        return self.perplexity * math.exp(min(cost, 700.0))


def _predicted(batch: Mapping[str, object]) -> int:
    """The tokens of a batch that have one before them, as the loss counts them."""
    from bridge.calibration.reference_outputs import as_arrays

    (arrays,) = as_arrays((batch,))
    ids, mask = arrays.get("input_ids"), arrays.get("attention_mask")
    if ids is None:
        return 0
    return int((mask[:, 1:] * mask[:, :-1]).sum()) if mask is not None and mask.ndim == 2 else ids[:, 1:].size
