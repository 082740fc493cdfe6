"""Run a model by blocks for the scores of a cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bridge.calibration.data import BATCH, Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.walk.budget import tokens_of
from bridge.core.errors import CalibrationError
from bridge.core.progress import Progress, no_progress
from bridge.core.values import Structure
from bridge.sources.pruned.kept import At, Repaired
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.scores import check_finite
from bridge.sources.pruned.sparse import Sparse
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.calibration.importance.sparsity import Sparsifier
    from bridge.calibration.reference_outputs import Answers
    from bridge.calibration.walk.options import Watch

TOKENS = 5  # that a repair needs a channel; on tiny-llama 1.3 made the model worse, 5 took half of the gain, 40 all


@dataclass(frozen=True)
class Measured:
    """Scores by dim and place, and what was solved anew; `thin`: layer and expert that too few tokens reached.

    `perplexity`: of the model on the held-out inputs, None if it has none.
    """

    scores: Mapping[str, Mapping[At, np.ndarray]]
    repaired: Mapping[str, Repaired]
    thin: tuple[tuple[int, int], ...] = ()
    perplexity: float | None = None


def measure_scores(
    cut: Cut,
    structure: Structure,
    data: Data,
    *,
    importance: str = "output",
    repair: bool = False,
    by_importance: bool = False,
    device: str | None = None,
    progress: Progress = no_progress,
) -> Measured:
    """Run the data through the model with one block of it in memory at a time.

    Raises:
        CalibrationError: there are no data, too few to repair, or the model cannot be run on them.
    """
    if not data.batches:
        raise CalibrationError(f"scores need data to run the model on: {data.missing or 'a forward_loop has none'}")
    if repair:
        check_enough(cut, data)
    from bridge.calibration.importance.readers import layers_of, norms_of, readers_of
    from bridge.calibration.importance.scorer import Scorer
    from bridge.calibration.importance.watch import ScoreWatch
    from bridge.calibration.modelopt import import_frameworks
    from bridge.sources.live_models.checkpoint_names import live_names

    import_frameworks(with_modelopt=False)
    origins = live_names(cut.source.load_skeleton(), cut.source.specs)
    scorer = Scorer(cut, importance, TOKENS if repair else 0, by_importance)
    norms = norms_of(cut, origins) if "hidden" in cut.dims else ()
    layers = layers_of(cut, origins) if "layers" in cut.dims else {}
    watch = ScoreWatch(readers_of(cut, origins), norms, layers, repair, scorer.settle)
    answers = _watched(cut.source, structure, data, watch, device, progress)
    scores = scorer.scores(watch)
    check_finite(scores)
    return Measured(scores, scorer.repaired, tuple(scorer.thin), answers.perplexity)


def measure_zeros(
    cut: Cut,
    structure: Structure,
    data: Data,
    sparse: Sparse,
    *,
    device: str | None = None,
    progress: Progress = no_progress,
) -> Sparsifier:
    """Run the data for Wanda's norms or SparseGPT's weights.

    Every matrix sees the inputs of the whole model, as in ModelOpt.

    Raises:
        CalibrationError: there are no data, or the model cannot be run on them.
    """
    if not data.batches:
        raise CalibrationError(f"{sparse.method} needs data to run on: {data.missing or 'a forward_loop has none'}")
    from bridge.calibration.importance.readers import linears_of
    from bridge.calibration.importance.sparsity import Sparsifier
    from bridge.calibration.importance.watch import ScoreWatch
    from bridge.calibration.modelopt import import_frameworks
    from bridge.sources.live_models.checkpoint_names import live_names

    import_frameworks(with_modelopt=False)
    readers = linears_of(cut, sparse.axes, live_names(cut.source.load_skeleton(), cut.source.specs))
    made = Sparsifier(sparse.method, cut.before.get("experts", 1))
    watch = ScoreWatch(readers, (), {}, sparse.method == "sparsegpt", made.settle)
    _watched(cut.source, structure, data, watch, device, progress)
    return made


def perplexity_of(source: Source, structure: Structure, data: Data, device: str | None) -> float | None:
    """Run the held-out inputs through a model block by block; None if it predicts no next token."""
    from bridge.calibration.importance.watch import ScoreWatch

    watch = ScoreWatch((), (), {}, False, lambda *_: None)
    return _watched(source, structure, replace(data, batches=()), watch, device).perplexity


def check_blocks_finite(source: Source, structure: Structure, data: Data, device: str | None) -> None:
    """Run the held-out inputs through every block; CalibrationError names the module that makes NaN of them."""
    from bridge.calibration.walk.options import Watch

    named = source.load_skeleton().named_modules()
    watch = Watch({name for name, module in named if name and [*module.parameters(recurse=False)]})
    _watched(source, structure, replace(data, batches=data.held_out, held_out=()), watch, device)


def _watched(
    source: Source,
    structure: Structure,
    data: Data,
    watch: Watch,
    device: str | None,
    progress: Progress = no_progress,
) -> Answers:
    """Run the data through the unquantized model, block by block; the scheme has no part in what is watched."""
    from bridge.calibration.walk.run import watch_by_blocks
    from bridge.quant.schemes.load import load_scheme

    job = CalibrationJob(source, structure, load_scheme("int8_wo"), data, device, progress)
    return watch_by_blocks(job, watch)[1]


def check_enough(cut: Cut, data: Data, parts: int = 1) -> None:
    """Refuse data with which a repair would make the model worse. `parts`: `data` are one of so many alike."""
    tokens = tokens_of(data).calibrated
    widths = {"heads": cut.after.get("head_dim", cut.after.get("v_dim", 1))}
    channels, dim = max(
        ((cut.after[dim] * widths.get(dim, 1), dim) for dim in ("ffn", "heads", "shared_ffn") if dim in cut.dims),
        default=(0, ""),
    )
    if tokens < TOKENS * channels:
        rows = parts * -(-TOKENS * channels // data.sequence // BATCH) * BATCH if data.sequence else 0
        more = f"samples={rows} (--samples {rows}), or more data where the text ends before" if rows else "more data"
        raise CalibrationError(
            f"repair=True (--repair) fits {channels} channels of {dim} to {tokens} tokens, and needs {TOKENS} a "
            f"channel, {TOKENS * channels}: give {more}; or leave repair out"
        )
