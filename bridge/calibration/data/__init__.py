"""Calibration data of any form, as batches of token ids."""

from bridge.calibration.data.prepare import prepare
from bridge.calibration.data.rows import decoder_inputs
from bridge.calibration.data.values import (
    AUTO,
    BATCH,
    DEFAULT,
    FP32,
    HELD_OUT,
    MOST_SAMPLES,
    SAMPLES,
    SEQUENCE,
    Data,
    Sampling,
    check_compute,
)

__all__ = [
    "AUTO",
    "BATCH",
    "DEFAULT",
    "FP32",
    "HELD_OUT",
    "MOST_SAMPLES",
    "SAMPLES",
    "SEQUENCE",
    "Data",
    "Sampling",
    "check_compute",
    "decoder_inputs",
    "prepare",
]
