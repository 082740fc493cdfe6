"""How many rows of the data a pruning runs."""

from __future__ import annotations

from bridge.calibration.data import Sampling
from bridge.sources.configs.positions import positions
from bridge.sources.source import Source

SAMPLES, SEQUENCE = 64, 256  # 16 rows keep 93 % of the same channels


def sampling_of(source: Source, samples: int | None, sequence: int | None, field: str | None) -> Sampling:
    """What a user asks for, or as much as the model has positions for."""
    limit = positions(source.config) or SEQUENCE
    return Sampling(samples or SAMPLES, sequence or min(SEQUENCE, limit), field)
