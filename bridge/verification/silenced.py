"""Compare a pruned model with the whole one, other parts silent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.calibration.reference_outputs import runner
from bridge.sources.pruned.silenced import silenced
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Source

MOST = 1e-5  # cuts of the tiny models of all families differ by 1e-6 at most, two channels exchanged by 2e-2


def silenced_error(pruned: PrunedSource, inputs: Mapping[str, np.ndarray]) -> float | None:
    """The relative L2 distance of the outputs for the first row of `inputs`, in float32; None if they may differ."""
    whole = silenced(pruned)
    if whole is None:
        return None
    want = _outputs(whole, inputs)
    return float(np.linalg.norm(_outputs(pruned, inputs) - want) / np.linalg.norm(want))


def _outputs(source: Source, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    import torch

    model = source.load_model().float()
    output: np.ndarray = runner(model)({name: torch.from_numpy(rows[:1]) for name, rows in inputs.items()}).numpy()
    return output
