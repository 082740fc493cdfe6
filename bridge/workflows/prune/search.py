"""Find the best pruned sizes for a budget, by measured cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.api.request import data_of
from bridge.api.words import SchemeName
from bridge.core.errors import PlanError, UsageError
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import Cut, whole_of
from bridge.sources.pruned.scores import Scores
from bridge.workflows.prune.rounds import Rounds
from bridge.workflows.prune.searched import Searched
from bridge.workflows.prune.sizes import Keep, Sizer, ladders_of, largest_of, parse_budget
from bridge.workflows.prune.trial import Trial
from bridge.workflows.prune.verbs import given_scores, sampling_of


@shows_progress
def search(
    model: Any,
    budget: Mapping[str, int | str],
    *,
    dims: Sequence[str] | None = None,
    data: Any = None,
    importance: str | Scores | Path = "output",
    repair: bool = False,
    quant: SchemeName | str | Path | Scheme | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    field: str | None = None,
    device: str | None = None,
    progress: Progress | bool | None = None,
) -> Searched:
    """Find the sizes of a smaller model that cost least within a budget, by running the candidates.

    The model runs once for all scores, as `pruned` runs it. Then every size of each dim is measured alone, by the rise
    of the next-token loss on rows that scored nothing. Sums of these costs rank the combinations; the best are
    measured, those around the best of them too, and the least measured cost wins. The smaller model is then made with
    all rows, as `pruned` makes it. Every run has one block in memory.

    Args:
        model: what `pruned` takes; a language model, not quantized.
        budget: one of {"parameters": "60%"} (values of all tensors, or a number), {"bytes": "3GB"} (of tensors,
            as target hf writes them with `quant`) and {"latency": "70%"}: of these bytes what one token reads when it
            is decoded alone; of routed experts only as many as a token reaches, of a lookup one row.
        dims: those that may change, None for all of the model; see `pruned`.
        data: what the model runs on, as `calibrate` takes it; every second batch only measures.
        importance, repair, samples, sequence, field, device: as `pruned` has them. Repaired, each candidate takes a run
            of its own.
        quant: the scheme in which bytes are counted; sizes that it cannot have are left out.

    Raises:
        UsageError: the budget cannot be read, or the model has no such dim.
        PlanError: nothing is as small as the budget, or the model fits it already.
        CalibrationError: the data are too few, or the model predicts no next token.

    >>> model = "examples/models/tiny-llama"
    >>> found = bridge.search(model, {"parameters": "80%"}, dims=["ffn"], samples=16, sequence=64)
    >>> list(found.keep), found.size <= 0.8 * found.whole
    (['ffn'], True)
    """
    asked = parse_budget(budget)
    source = open_source(model, config, tokenizer)
    whole, given = whole_of(source), given_scores(importance)
    if given:
        given.check(source.fingerprint)
    if repair and (given or importance == "weights"):
        raise UsageError("repair=True (--repair) needs scores of a run on data; leave importance (--importance) out")
    sizer = Sizer(whole, asked.kind, quant)
    limit, tell = asked.limit(sizer.whole), asked.amount_text
    if limit >= sizer.whole:
        raise PlanError(f"budget {asked.text}: the whole model has {tell(sizer.whole)}, which fits; give less")
    ladders = ladders_of(whole, _scored(whole, dims, given, importance), lambda keep: _fits(whole, sizer, keep))
    rounds = Rounds(whole, ladders, sizer, limit)
    if (least := rounds.least) > limit:
        raise PlanError(
            f"budget {asked.text}: at most {tell(limit)} of {tell(sizer.whole)}, and the smallest that the search "
            f"reaches has {tell(least)} ({least / sizer.whole:.1%}); give more, or other dims= (--dims)"
        )
    prepared = data_of(source, data, sampling_of(source, samples, sequence, field))
    trial = Trial(whole, prepared, importance if isinstance(importance, str) else "", repair, device)
    trial.warn_of_few()
    if repair:
        trial.check_enough(largest_of(whole, ladders))
    trial.prepare(given, {dim for ladder in ladders for keep in ladder for dim in keep})
    best, tried = rounds.run(trial.cost, callback_of(progress))
    smaller, scores = trial.result(best.keep)
    return Searched(
        source.where, asked, best.keep, best.size, limit, sizer.whole, best.cost,
        (trial.perplexity, trial.loss(best.cost)), trial.tokens, tried,
        "" if isinstance(importance, Scores) else str(importance), repair,
        {
            "model": model, "quant": quant, "config": config, "tokenizer": tokenizer, "data": data, "samples": samples,
            "sequence": sequence, "field": field, "device": device,
        },
        smaller, scores,
    )  # fmt: skip


def _scored(
    whole: Cut, dims: Sequence[str] | None, given: Scores | None, importance: str | Scores | Path
) -> Sequence[str] | None:
    """The dims that scores can choose from; those that a user names are taken as they are."""
    known = [dim for dim in whole.matched.table.roles.prune if dim in whole.before and dim != "vocab"]
    if given:
        scored = [dim for dim in known if ("heads" if dim == "kv_heads" else dim) in given.scores]
        if missing := [dim for dim in dims or () if dim in known and dim not in scored]:
            raise UsageError(f"dims: {', '.join(missing)}: the scores that were given have none; leave them out")
        return dims or scored
    if dims is None and importance == "weights":
        return [dim for dim in known if dim not in ("hidden", "layers")]
    return dims


def _fits(whole: Cut, sizer: Sizer, keep: Keep) -> bool:
    """Whether a size can be cut, and written in the scheme."""
    try:
        cut = whole.to(keep)
        if sizer.quant is not None:
            sizer.exact(cut)
    except PlanError:
        return False
    return True
