"""Translate params.json of Meta and Mistral into terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.text import nearest
from bridge.sources.configs.derive import Declared
from bridge.sources.configs.facts import COUNT, NUMBER, TRUTH, Fact, Kind, mistyped, shown
from bridge.sources.configs.megatron import LLAMA3

_TERMS = {
    "dim": "hidden",
    "n_layers": "layers",
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "hidden_dim": "ffn",
    "norm_eps": "eps",
    "rope_theta": "theta",
    "vocab_size": "vocab",
    "max_seq_len": "context",
    "sliding_window": "window",
}
_READ: Mapping[str, Kind] = {
    "dim": COUNT,
    "multiple_of": COUNT,
    "ffn_dim_multiplier": NUMBER,
    "use_scaled_rope": TRUTH,
    "rope_scaling_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "use_biases": TRUTH,
}
_UNUSED = {"max_batch_size", "model_parallel_size"}

# Published models, by dim, n_layers, vocab_size and use_scaled_rope -> factor of the scaling, longest sequence, which
# their params.json do not have.
_PUBLISHED: Mapping[tuple[object, ...], tuple[float | None, int]] = {
    (4096, 32, 128256, False): (None, 8192),     # Llama 3 8B
    (8192, 80, 128256, False): (None, 8192),     # Llama 3 70B
    (4096, 32, 128256, True): (8.0, 131072),     # Llama 3.1 8B
    (8192, 80, 128256, True): (8.0, 131072),     # Llama 3.1 and 3.3 70B
    (16384, 126, 128256, True): (8.0, 131072),   # Llama 3.1 405B
    (2048, 16, 128256, True): (32.0, 131072),    # Llama 3.2 1B
    (3072, 28, 128256, True): (32.0, 131072),    # Llama 3.2 3B
}  # fmt: skip


def declared_by_meta(params: Any, where: str = "params.json") -> Declared:
    """Read params.json; a missing value is Meta's default or asked for, an unknown key is a problem."""
    if not isinstance(params, Mapping):
        raise SourceError(f"{where}: not a JSON object")
    known = {*_TERMS, *_READ, *_UNUSED}
    problems = [
        f"{where}: {name} = {shown(value)} is unknown; {nearest(str(name), sorted(known))}"
        for name, value in params.items()
        if name not in known
    ]
    facts = {name: Fact(value, f"{where}: {name}") for name, value in params.items() if value is not None}
    problems += mistyped(facts, _READ)
    own = {name: fact.value for name, fact in facts.items()}
    if own.get("use_biases"):
        problems.append(f"{where}: use_biases = true: no supported architecture has that")
    terms = {
        term: facts[name]
        for name, term in _TERMS.items()
        if name in facts and (name, own[name]) != ("vocab_size", -1)  # Llama 1 and 2: see the tokenizer
    }
    if "heads" in terms:
        terms.setdefault("kv_heads", Fact(terms["heads"].value, f"{where} has no n_kv_heads: n_heads"))
    terms.setdefault("theta", Fact(10000.0, f"{where} has no rope_theta: Meta's default"))
    _width(own, terms, where)
    scaled = own.get("use_scaled_rope", False)
    key = (own.get("dim"), own.get("n_layers"), own.get("vocab_size"), scaled)
    factor, context = next((values for model, values in _PUBLISHED.items() if model == key), (None, None))
    if context:
        terms.setdefault("context", Fact(context, f"{where}: dim, n_layers and vocab_size of a published model"))
    factor = own.get("rope_scaling_factor", factor)
    if scaled and factor is not None:
        high = float(own.get("high_freq_factor", LLAMA3["high_freq_factor"]))
        scaling = {"rope_type": "llama3", "factor": float(factor), **LLAMA3, "high_freq_factor": high}
        terms["scaling"] = Fact(scaling, f"{where}: use_scaled_rope")
    return Declared(terms, tuple(problems), ("scaling",) if scaled and factor is None else ())


def _width(own: Mapping[str, Any], terms: dict[str, Fact], where: str) -> None:
    """Compute the inner width as Meta's code does: two thirds of 4 x dim, scaled, rounded up to a multiple."""
    if "ffn" in terms or not own.keys() >= {"dim", "multiple_of"}:
        return
    width, used = int(2 * 4 * own["dim"] / 3), "dim, multiple_of"
    if "ffn_dim_multiplier" in own:
        width, used = int(own["ffn_dim_multiplier"] * width), "dim, multiple_of, ffn_dim_multiplier"
    terms["ffn"] = Fact(-(-width // own["multiple_of"]) * own["multiple_of"], f"{where}: {used}")
