"""Run a model block by block, and return the scores that a cut needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from bridge.calibration.data import Data
from bridge.calibration.pruning.amount import TOKENS
from bridge.calibration.walk.budget import tokens_of
from bridge.core.errors import CalibrationError
from bridge.core.progress import Progress, no_progress
from bridge.core.values import Structure
from bridge.sources.pruned.kept import At
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.repaired import Repaired


@dataclass(frozen=True)
class Measured:
    """Scores by dim and place, and what was solved anew; `thin`: layer and expert that too few tokens reached."""

    scores: Mapping[str, Mapping[At, np.ndarray]]
    repaired: Mapping[str, Repaired]
    thin: tuple[tuple[int, int], ...] = ()


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
        _check_enough(cut, data)
    from bridge.calibration.modelopt import import_frameworks
    from bridge.calibration.pruning.places import layers_of, norms_of, readers_of
    from bridge.calibration.pruning.scorer import Scorer
    from bridge.calibration.pruning.watch import ScoreWatch
    from bridge.calibration.walk.run import watch_by_blocks
    from bridge.quant.schemes.load import load_scheme
    from bridge.sources.live_models.checkpoint_names import live_names

    import_frameworks(with_modelopt=False)
    origins = live_names(cut.source.load_skeleton(), cut.source.specs)
    scorer = Scorer(cut, importance, repair, by_importance)
    norms = norms_of(cut, origins) if "hidden" in cut.dims else ()
    layers = layers_of(cut, origins) if "layers" in cut.dims else {}
    watch = ScoreWatch(readers_of(cut, origins), norms, layers, repair, scorer.settle)
    plain = load_scheme("int8_wo").bound(structure.sites)
    watch_by_blocks(cut.source, structure, plain, replace(data, held_out=()), device, progress, watch)
    return Measured(scorer.scores(watch), scorer.repaired, tuple(scorer.thin))


def _check_enough(cut: Cut, data: Data) -> None:
    """Refuse data with which a repair would make the model worse."""
    tokens = tokens_of(data).calibrated
    widths = {"heads": cut.after.get("head_dim", cut.after.get("v_dim", 1))}
    for dim in {"ffn", "heads", "shared_ffn"} & {*cut.dims}:
        channels = cut.after[dim] * widths.get(dim, 1)
        if tokens < TOKENS * channels:
            raise CalibrationError(
                f"repair=True (--repair) fits {channels} channels of {dim} to {tokens} tokens, and needs {TOKENS} a "
                f"channel, {TOKENS * channels}: give more samples= (--samples) or text, or leave repair out"
            )
