"""Whether norms are stored less one, which no shape tells: said, answered or asked for, and never assumed.

Megatron-Core can keep `w - 1` of any norm. NeMo 2 and Megatron-Bridge do it for Gemma and Nemotron, NeMo 1 does not do
it for Gemma, and of LayerNorm both are found. A family with neither is not asked about.
"""

from __future__ import annotations

from bridge.sources.foreign_config.said import Given, Said, Saying
from bridge.tables.arch import load_arch
from bridge.tables.grammar import Call

FIELD = "layernorm_zero_centered_gamma"
_ASKED = (
    "whether norms are stored less one, as Megatron-Core calls it (`--apply-layernorm-1p` of Megatron-LM); Gemma's and "
    "Nemotron's are, but for Gemma of NeMo 1"
)


def take_centered(terms: dict[str, Said], entries: Given) -> None:
    """Put the caller's answer in the place of what is said; it is a native field, which no config.json has."""
    if FIELD in entries:
        terms["centered"] = Said(entries.pop(FIELD), entries.where(FIELD))


def ask_centered(architecture: str, layer_norm: bool, terms: Saying) -> dict[str, str]:
    """Return the question where nobody says it and writers differ."""
    if "centered" in terms or not (layer_norm or _is_centered(architecture)):
        return {}
    return {FIELD: _ASKED}


def _is_centered(architecture: str) -> bool:
    """Whether transformers keeps the norms of this architecture less one; its table says so."""
    table = load_arch(architecture)
    rows = table.rows if table else ()
    return any(isinstance(row.expr, Call) and row.expr.op == "shift" for row in rows)
