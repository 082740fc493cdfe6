"""Measured costs of the schemes: `mappings/costs.toml`, which `benchmarks/schemes.py` writes."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, read_table

LANGUAGE = ("tiny-llama", "tiny-gpt2")  # measured by KL divergence and perplexity
EMBEDDING = ("all-MiniLM-L6-v2",)  # measured by its sentence embeddings
PLAIN = "none"  # the row of the unquantized models


@dataclass(frozen=True)
class Cost:
    """The measured cost of a scheme on one model.

    `bits`: of the file, for each weight of the matrices that a scheme may quantize; unquantized ones count 16. `kl`:
    nats a token, from the unquantized model. `cosine`, `error`: of embeddings, `error` relative to their length.
    `seconds`: of the processor, for calibration and conversion. `why`: the reason why nothing was measured.
    """

    bits: float | None = None
    kl: float | None = None
    perplexity: float | None = None
    cosine: float | None = None
    error: float | None = None
    seconds: float | None = None
    why: str = ""


Costs = dict[str, dict[str, Cost]]  # scheme -> model -> cost


def read_costs() -> Costs:
    """Read every row; TableError for a model or a figure that it does not know.

    >>> 8 <= read_costs()["fp8"]["tiny-llama"].bits < 8.1
    True
    """
    table = read_table(mappings() / "costs.toml")
    found: Costs = {}
    for scheme, rows in table.data.items():
        found[scheme] = {}
        for model, figures in rows.items():
            if model not in (*LANGUAGE, *EMBEDDING):
                raise table.place(scheme, model).error(f"{model} is not a model that is measured")
            try:
                found[scheme][model] = Cost(**figures)
            except TypeError as error:
                raise TableError(f"{table.name}: [{scheme}] {model}: {error}") from error
    return found
