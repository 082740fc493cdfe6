"""Measured quality of schemes and of other programs: `mappings/quality.toml`, which `benchmarks/quality.py` writes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, read_table

GIVEN, DITHERED = "smollm2", "smollm2-dithered"
REAL = (GIVEN, DITHERED)  # SmolLM2-135M-Instruct; its given weights lie on a grid of 16 levels, which favours 4 bits
LANGUAGE = (*REAL, "tiny-llama", "tiny-gpt2")  # measured by KL divergence and perplexity
EMBEDDING = ("all-MiniLM-L6-v2",)  # measured by its sentence embeddings
MODELS = (*LANGUAGE, *EMBEDDING)
TITLES = {GIVEN: "SmolLM2-135M", DITHERED: "SmolLM2-135M, dithered"}
PLAIN = "none"  # the row of the unquantized models
KINDS = ("scheme", "peer")


@dataclass(frozen=True)
class Quality:
    """What a scheme, or another program, makes of one model.

    `bits`: on disk, a value of the matrices of layers; unquantized ones count 16. `megabytes`: of all files. `kl`: nats
    a token, from the unquantized model, `kl_error` its standard error over windows. `draws`: the KL of each draw of
    calibration rows, `kl` then their mean; other figures are of the first draw. `agreement`: the share of tokens where
    both models predict the same. `cosine`, `error`: of embeddings, `error` relative to their length. `accuracy`:
    on the items of the task. `reported`: the rise of the loss by the report of the conversion, nats a token.
    `seconds`: of the processor, the whole command, and `memory` its peak in MB. `why`: why nothing was measured.
    """

    bits: float | None = None
    megabytes: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    draws: tuple[float, ...] = ()
    perplexity: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    error: float | None = None
    accuracy: float | None = None
    reported: float | None = None
    seconds: float | None = None
    memory: float | None = None
    why: str = ""

    @property
    def spread(self) -> float | None:
        """The standard deviation of KL over draws of calibration rows; None if one was measured."""
        return statistics.stdev(self.draws) if len(self.draws) > 1 else None

    @property
    def older(self) -> bool:
        """Whether it was measured before rows had sizes and agreement: weights were decoded by this package."""
        return not self.why and self.agreement is None and self.megabytes is None


Rows = dict[str, dict[str, Quality]]  # a scheme with its options, or a peer -> model -> quality


def read_quality(kind: str = KINDS[0], path: Path | None = None) -> Rows:
    """Read every row of schemes, or of peers; TableError for a model or a figure that it does not know.

    >>> 8 <= read_quality()["fp8"]["tiny-llama"].bits < 8.1
    True
    """
    table = read_table(path or mappings() / "quality.toml")
    table.known_keys(KINDS)
    found: Rows = {}
    for name, rows in table.data.get(kind, {}).items():
        found[name] = {}
        for model, figures in rows.items():
            if model not in MODELS:
                raise table.place(f"{kind}.{name}", model).error(f"{model} is not a model that is measured")
            try:
                found[name][model] = Quality(**{**figures, "draws": tuple(figures.get("draws", ()))})
            except TypeError as error:
                raise TableError(f"{table.name}: [{kind}.{name}] {model}: {error}") from error
    return found
