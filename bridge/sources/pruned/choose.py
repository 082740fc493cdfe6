"""Choose what is kept: the highest scores of each dim."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.sources.pruned.kept import At, Kept
from bridge.tables.expressions.selected_positions import Positions

Scores = Mapping[str, Mapping[At, "np.ndarray"]]  # dim -> place -> a score for each position


def choose(before: Mapping[str, int], after: Mapping[str, int], scores: Scores, by_importance: bool = False) -> Kept:
    """Keep `after` positions of each dim with the highest scores; of equal ones the first.

    They stay in their order, or come in that of their scores. Query heads are chosen inside their group, after the
    groups; a group's score is the sum of its heads' squares. Layers and tokens keep their order.
    """
    choices: dict[str, dict[At, Positions]] = {}
    for dim, places in scores.items():
        if dim in ("heads", "kv_heads") or after[dim] == before[dim]:
            continue
        ordered = by_importance and dim not in ("layers", "vocab")
        choices[dim] = {place: _best(score, after[dim], ordered) for place, score in places.items()}
    if "heads" in scores and any(after.get(dim) != before.get(dim) for dim in ("heads", "kv_heads")):
        choices |= _heads(before, after, scores["heads"], by_importance)
    share = {
        dim: min(_share(scores[dim][at], kept) for at, kept in choices[dim].items()) for dim in choices if dim in scores
    }
    return Kept(before, after, choices, share)


def _share(score: np.ndarray, kept: Positions) -> float:
    """The part of the summed squares of scores that is kept; 1 if all are zero."""
    squares = np.square(score, dtype=np.float64)
    return float(squares[kept].sum() / squares.sum()) if squares.any() else 1.0


def _best(score: np.ndarray, count: int, by_importance: bool) -> Positions:
    """The positions of the `count` highest scores."""
    best = np.argsort(-score, kind="stable")[:count]
    return best if by_importance else np.sort(best)


def _heads(
    before: Mapping[str, int], after: Mapping[str, int], scores: Mapping[At, np.ndarray], by_importance: bool
) -> dict[str, dict[At, Positions]]:
    """The groups of each layer, and the query heads of each kept group."""
    groups = before.get("kv_heads", 1)
    kept_groups = after.get("kv_heads", 1)
    heads: dict[At, Positions] = {}
    grouped: dict[At, Positions] = {}
    for place, score in scores.items():
        of_group = score.reshape(groups, -1)
        kept = _best(np.square(of_group).sum(axis=1), kept_groups, by_importance and kept_groups < groups)
        each = after["heads"] // kept_groups
        inside = [group * of_group.shape[1] + _best(of_group[group], each, by_importance) for group in kept.tolist()]
        grouped[place], heads[place] = kept, np.concatenate(inside)
    return {"heads": heads, **({"kv_heads": grouped} if "kv_heads" in before else {})}
