"""Meta's params.json in our terms, and of Mistral's in the same format; a key that is unknown is a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError, nearest
from bridge.sources.foreign_config.derive import Told
from bridge.sources.foreign_config.megatron import LLAMA3
from bridge.sources.foreign_config.said import Said, number

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
_ROPE = ("rope_scaling_factor", "high_freq_factor")
_READ = {"multiple_of", "ffn_dim_multiplier", "use_scaled_rope", *_ROPE}
_UNUSED = {"max_batch_size", "model_parallel_size", "use_biases"}

# Published models, by dim, n_layers, vocab_size and use_scaled_rope -> factor of the scaling, longest sequence. Their
# params.json tell neither.
_PUBLISHED: Mapping[tuple[object, ...], tuple[float | None, int]] = {
    (4096, 32, 128256, False): (None, 8192),     # Llama 3 8B
    (8192, 80, 128256, False): (None, 8192),     # Llama 3 70B
    (4096, 32, 128256, True): (8.0, 131072),     # Llama 3.1 8B
    (8192, 80, 128256, True): (8.0, 131072),     # Llama 3.1 and 3.3 70B
    (16384, 126, 128256, True): (8.0, 131072),   # Llama 3.1 405B
    (2048, 16, 128256, True): (32.0, 131072),    # Llama 3.2 1B
    (3072, 28, 128256, True): (32.0, 131072),    # Llama 3.2 3B
}  # fmt: skip


def meta_told(params: Any, where: str = "params.json") -> Told:
    """Read params.json; what it leaves to the reader's code is Meta's default, or asked for."""
    if not isinstance(params, Mapping):
        raise SourceError(f"{where}: holds no JSON object")
    problems = [
        f"{where}: {name} = {params[name]!r} is unknown; {nearest(str(name), [*_TERMS, *_READ, *_UNUSED])}"
        for name in params
        if name not in {*_TERMS, *_READ, *_UNUSED}
    ]
    if params.get("use_biases"):
        problems.append(f"{where}: use_biases = true: no supported architecture has that")
    terms = {
        term: Said(params[name], f"{where}: {name}")
        for name, term in _TERMS.items()
        if params.get(name) is not None
        and (name, params[name]) != ("vocab_size", -1)  # Llama 1 and 2: see the tokenizer
    }
    if "heads" in terms:
        terms.setdefault("kv_heads", Said(terms["heads"].value, f"{where} has no n_kv_heads: n_heads"))
    terms.setdefault("theta", Said(10000.0, f"{where} has no rope_theta: Meta's default"))
    _width(params, terms, where)
    scaled = params.get("use_scaled_rope") is True
    key = [params.get("dim"), params.get("n_layers"), params.get("vocab_size"), scaled]
    factor, context = next((found for known, found in _PUBLISHED.items() if list(known) == key), (None, None))
    if context:
        terms.setdefault("context", Said(context, f"{where}: dim, n_layers and vocab_size of a published model"))
    if not scaled:
        return Told(terms, tuple(problems))
    given = {name: number(Said(params[name], f"{where}: {name}")) for name in _ROPE if params.get(name) is not None}
    factor = given.get("rope_scaling_factor", factor)
    if factor is None:
        return Told(terms, tuple(problems), ("scaling",))
    high = {"high_freq_factor": given["high_freq_factor"]} if "high_freq_factor" in given else {}
    scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3, **high}
    terms["scaling"] = Said(scaling, f"{where}: use_scaled_rope")
    return Told(terms, tuple(problems))


def _width(params: Mapping[str, Any], terms: dict[str, Said], where: str) -> None:
    """Compute the inner width as Meta's code does: two thirds of 4 x dim, scaled, rounded up to a multiple."""
    dim, multiple = params.get("dim"), params.get("multiple_of")
    if "ffn" in terms or not isinstance(dim, int) or not isinstance(multiple, int) or multiple < 1:
        return
    width, used = int(2 * 4 * dim / 3), "dim, multiple_of"
    if params.get("ffn_dim_multiplier") is not None:
        by = number(Said(params["ffn_dim_multiplier"], f"{where}: ffn_dim_multiplier"))
        width, used = int(by * width), "dim, multiple_of, ffn_dim_multiplier"
    terms["ffn"] = Said(-(-width // multiple) * multiple, f"{where}: {used}")
