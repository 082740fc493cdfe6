"""Choose how many rows to calibrate with."""

from __future__ import annotations

from dataclasses import replace

from bridge.calibration.data import SAMPLES, Sampling
from bridge.quant.schemes.scheme import Scheme, is_calibrated

# Rows by algorithm, if not `SAMPLES`. SmoothQuant needs the maximum of every channel: on tiny-llama (rows of 128
# tokens) the KL divergence of int8_sq is 0.0033 with 32 rows, 0.0018 with 128 and 0.0018 with 512. That of fp8 (max)
# stays between 0.0057 and 0.0058 from 2 to 512 rows, that of int4_awq between 0.0425 and 0.0447 from 2 to 64.
# That of int4_gptq is 0.0241 with 8 rows, 0.0207 with 32 and 0.0202 with 128 (other rows measured).
BY_ALGORITHM = {"smoothquant": 128}


def default_samples(scheme: Scheme | None) -> int:
    """Return the number of rows for the algorithms of a scheme; the largest, if a recipe has several.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> default_samples(load_scheme("fp8")), default_samples(load_scheme("int8_sq"))
    (32, 128)
    """
    formats = scheme.formats if scheme else ()
    return max((BY_ALGORITHM.get(f.algorithm, SAMPLES) for f in formats if is_calibrated(f)), default=SAMPLES)


def sampling_for(sampling: Sampling, scheme: Scheme | None) -> Sampling:
    """Return `sampling` with the default of the scheme."""
    return replace(sampling, default=default_samples(scheme))
