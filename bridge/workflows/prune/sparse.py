"""Make a model sparse for `pruned`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridge.api.request import data_of
from bridge.calibration.data import Sampling
from bridge.core.errors import warn
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of
from bridge.core.text import number
from bridge.planning.structure import structure_of
from bridge.sources.pruned.opening import plan_sparse
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Source


def made_sparse(
    source: Source,
    method: str,
    data: Any,
    sampling: Sampling,
    device: str | None,
    progress: Progress | bool | None,
) -> PrunedSource:
    """Return the model with two zeros in every four weights of its layers; only magnitudes take no run."""
    cut, sparse = plan_sparse(source, method)
    if method == "magnitude":
        return cut.pruned({}, sparse=sparse)
    from bridge.calibration.importance.measure import measure_zeros, perplexity_of

    prepared = data_of(source, data, sampling)
    made, before = measure_zeros(
        cut, structure_of(source), prepared, sparse, device=device, progress=callback_of(progress)
    )
    if made.thin:
        warn(
            f"no token reached {number(len(made.thin), 'matrix', 'matrices')} of experts, whose zeros go by magnitude "
            "alone; give more samples= (--samples)"
        )
    sparser = cut.pruned({}, repaired=made.repaired, sparse=replace(sparse, norms=made.norms))
    if before is not None:
        after = perplexity_of(sparser, structure_of(sparser), prepared, device)
        sparser.perplexity = (before, after) if after is not None else ()
    return sparser
