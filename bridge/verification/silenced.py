"""Compare a pruned model with the whole one, other parts silent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.calibration.reference_outputs import proving
from bridge.core.text import layer_of
from bridge.sources.pruned.silenced import silenced
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Source

# A layer: rounding in float32, in another order of sums, adds up over layers. Cuts of the tiny models of all families,
# of 2 to 5 layers, differ by 1e-6 at most, two channels exchanged by 2e-2.
MOST = 1e-5


def silenced_error(pruned: PrunedSource, inputs: Mapping[str, np.ndarray]) -> float | None:
    """The relative L2 distance of the outputs for the first row of `inputs`, in float32; None if they may differ."""
    whole = silenced(pruned)
    if whole is None:
        return None
    want = _outputs(whole, inputs)
    return float(np.linalg.norm(_outputs(pruned, inputs) - want) / np.linalg.norm(want))


def most_of(pruned: PrunedSource) -> float:
    """The largest distance that rounding explains."""
    return MOST * max(1, len({layer_of(name) for name in pruned.specs} - {None}))


def _outputs(source: Source, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    import torch

    model = source.load_model().float()
    output: np.ndarray = proving(model)({name: torch.from_numpy(rows[:1]) for name, rows in inputs.items()}).numpy()
    return output
