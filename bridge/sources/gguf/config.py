"""A model's terms from the keys of its GGUF file.

What llama.cpp computes without a key is in its table of graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.core.errors import SourceError
from bridge.core.formats.gguf import COMPUTED
from bridge.core.mappings import mappings, read_table
from bridge.core.text import nearest
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import Declared
from bridge.sources.configs.extents import layout_of
from bridge.sources.configs.facts import (
    COUNT,
    FACTOR,
    FROM_ZERO,
    KINDS,
    NUMBER,
    TRUTH,
    WORD,
    Fact,
    Facts,
    mistyped,
    shown,
)  # fmt: skip
from bridge.sources.configs.families import Family, family_of
from bridge.sources.configs.rope import Rope, llama3_factors
from bridge.tables.architectures.arch import load_arch
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.expressions.grammar import roles_in
from bridge.tables.llama_cpp import Graph, graphs

_TABLE = read_table(mappings() / "native_axes.toml")
ARCHITECTURE = "general.architecture"
ROUTER = "ffn_gate_inp.weight"  # of a layer with experts
# Llama 3.1's own numbers beside the factor; `rope_freqs` has their result only.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = 8192
(ROPE_FREQS,) = COMPUTED
DRAFTS = "nextn_predict_layers"
_THETA = 1e4  # llama.cpp's base of a file without one
NORMALIZED = "expert_weights_norm"
# Keys of which zero says that the model has none; every other zero is a number like others.
_NONE_AT_ZERO = (
    "attention.sliding_window", "attention.q_lora_rank", "expert_count", "expert_used_count", "expert_group_count",
    "expert_group_used_count", "expert_weights_scale",
)  # fmt: skip
_GATING = {1: "softmax", 2: "sigmoid"}  # llama.cpp's numbers of what makes scores of logits
_TERMS = {**KINDS, "theta": NUMBER, "window": COUNT}  # a file has one number, where others may have two
_READ = {
    "rope.dimension_count": COUNT, "attention.causal": TRUTH, "attention.value_length": COUNT,
    "attention.key_length_mla": COUNT, "rope.scaling.original_context_length": COUNT, "rope.scaling.factor": NUMBER,
    "rope.scaling.yarn_log_multiplier": FACTOR, "rope.scaling.yarn_beta_fast": NUMBER,
    "rope.scaling.yarn_beta_slow": NUMBER, "leading_dense_block_count": FROM_ZERO, "expert_shared_count": FROM_ZERO,
    "expert_gating_func": FROM_ZERO, DRAFTS: FROM_ZERO, "rope.scaling.type": WORD,
}  # fmt: skip


def architecture_of(where: str, metadata: Mapping[str, Any], specs: Mapping[str, TensorSpec], given: object) -> str:
    """The transformers class of a file; SourceError without a table for its architecture.

    `given`: the class that the caller names, if any; one name of llama.cpp's stands for several.
    """
    name = metadata.get(ARCHITECTURE)
    known = sorted({graph.name for graph in graphs().values() if not graph.refused})
    classes = [one for one, graph in graphs().items() if graph.name == name and not graph.refused]
    if not classes:
        near = nearest(name, known) if isinstance(name, str) else f"known: {', '.join(known)}"
        raise SourceError(f"{where}: {ARCHITECTURE} is {shown(name)}, which has no table here; {near}")
    if given is not None:
        if given not in classes:
            raise SourceError(
                f"{where}: config=: architectures is {shown(given)}; llama.cpp's {name} is {' or '.join(classes)}"
            )
        return str(given)
    routed = any(tensor.endswith(ROUTER) for tensor in specs)
    return next((one for one in classes if _routes(one) == routed), classes[0])


def _routes(architecture: str) -> bool:
    rows = table.rows if (table := load_arch(architecture)) else ()
    return any(row.expr and "moe.router.weight" in roles_in(row.expr) for row in rows)


def declared_by_gguf(
    metadata: Mapping[str, Any], specs: Mapping[str, TensorSpec], architecture: str, factors: np.ndarray | None
) -> Declared:
    """The terms of a file.

    `factors`: its tensor `rope_freqs.weight`, float32 [head_dim / 2], which frequencies are divided by.
    """
    graph, family = graphs()[architecture], family_of(architecture)
    if isinstance(family, str):
        raise SourceError(family)
    prefix = f"{graph.name}."
    own = {key.removeprefix(prefix): key for key in metadata if key.startswith(prefix)}
    facts = {name: Fact(_plain(metadata[key]), key) for name, key in own.items()}
    words, read = _TABLE.texts("gguf_terms"), {**_TABLE.texts("gguf_read")}
    dialect = load_dialect("gguf")
    if not dialect.draft_rows(architecture):
        del read[DRAFTS]  # llama.cpp's graph runs all blocks
    why = "is not read, so the model may compute otherwise"
    unread = {own[name]: fact for name, fact in facts.items() if name not in words and name not in read}
    refused = {key: f"{fact}: {why}; config={{{key!r}: None}} leaves it out" for key, fact in unread.items()}
    problems = mistyped(facts, _READ)
    none = {name for name in _NONE_AT_ZERO if name in facts and _is_zero(facts[name].value)}
    terms = {words[name]: fact for name, fact in facts.items() if name in words and name not in none}
    terms["tied"] = Fact("output.weight" not in specs, "output.weight")
    problems += mistyped(terms, _TERMS)
    if NORMALIZED not in graph.switches and "renormalize" in terms and not terms["renormalize"].value:
        problems.append(f"{terms['renormalize']}, but llama.cpp's {graph.name} divides by the sum in any case")
    if "layers" in terms and (drafts := facts.get(DRAFTS)) and DRAFTS in read:
        layers = terms["layers"]
        terms["layers"] = Fact(layers.value - drafts.value, f"{layers.where} - {drafts.where}")
    _add_experts(terms, facts)
    _add_fixed(terms, graph, family)
    scaled = _add_rope(terms, facts, graph, family, factors, problems)
    value = facts.get("attention.value_length")
    if value and "head_dim" in terms and value.value != terms["head_dim"].value and "v_dim" not in family.terms:
        problems.append(f"{value}, but {terms['head_dim']}: {architecture} has one width")
    return Declared(terms, tuple(problems), () if scaled else ("scaling",), refused)


def switched(metadata: Mapping[str, Any], architecture: str) -> dict[str, bool]:
    """Fields of config.json that a file switches, and no family has a term for."""
    graph = graphs()[architecture]
    fields = {str(field): bool(metadata.get(f"{graph.name}.{key}")) for key, field in graph.switches.items()}
    return fields | ({} if metadata.get(f"{graph.name}.attention.causal", True) else {"is_causal": False})


def windows_without_use(metadata: Mapping[str, Any], architecture: str) -> dict[str, str]:
    """The key of a window that llama.cpp's graph does not have -> what it does."""
    name, every = graphs()[architecture].name, graphs()[architecture].every
    key = f"{name}.attention.sliding_window"
    window, context = metadata.get(key), metadata.get(f"{name}.context_length")
    if every or type(window) is not int or type(context) is not int or not 0 < window < context:
        return {}
    return {key: f"a window of {window}; llama.cpp's {name} attends to every token, and so does this model"}


def drafts_of(metadata: Mapping[str, Any], specs: Mapping[str, TensorSpec], declared: Declared) -> dict[str, int]:
    """The tensors of draft layers, which are blocks after the model's -> the layer's number."""
    if "layers" not in declared.terms:
        return {}
    read, blocks = layout_of("gguf", specs).read, metadata[f"{metadata[ARCHITECTURE]}.block_count"]
    numbers = {name: read(name).layer for name in specs}
    last = range(declared.terms["layers"].value, blocks)
    return {name: number for name, number in numbers.items() if number is not None and number in last}


def _plain(value: Any) -> Any:
    """A float32 as the shortest number that is rounded to it: 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) and np.isfinite(value) else value


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _add_experts(terms: dict[str, Fact], facts: Facts) -> None:
    """Add what keys tell of experts in other words than ours."""
    dense, shared, gating = (
        facts.get(name) for name in ("leading_dense_block_count", "expert_shared_count", "expert_gating_func")
    )
    if dense:
        terms["dense"] = Fact(tuple(range(dense.value)), f"{dense.where} ({dense.value})")
    if shared and shared.value and "moe_ffn" in terms:
        where = f"{shared.where} ({shared.value}) * {terms['moe_ffn'].where}"
        terms["shared_ffn"] = Fact(shared.value * terms["moe_ffn"].value, where)
    if gating and gating.value:
        terms["score"] = Fact(_GATING.get(gating.value, "another"), f"{gating.where} ({gating.value})")


def _add_fixed(terms: dict[str, Fact], graph: Graph, family: Family) -> None:
    """Add what llama.cpp's graph computes without a key."""
    fixed = f"llama.cpp's {graph.name}"

    def default(term: str, value: object) -> None:
        if term not in terms:
            terms[term] = Fact(value, fixed)

    wide = "gelu_pytorch_tanh"  # llama.cpp's GELU is the approximation by tanh
    default("activation", wide if wide in graph.activations else graph.activations[0])
    default("renormalize", True)
    if "routed_scale" in family.terms:
        default("routed_scale", 1.0)
    default("score", graph.gating)
    for name, cap in graph.softcaps.items():
        default({"attn_logit_softcapping": "attn_softcap"}.get(name, "logit_softcap"), cap)
    if "heads" in terms and "hidden" in terms:
        default("kv_heads", terms["heads"].value)
        default("head_dim", terms["hidden"].value // terms["heads"].value)
        if "query_scale" in family.terms and graph.every and "layers" in terms:
            root = terms["layers"].value == graph.root_layers
            default("query_scale", terms["hidden"].value // terms["heads"].value if root else terms["head_dim"].value)
    if graph.every and "pattern" in family.terms:
        default("pattern", [graph.every - 1, 1])
    if not graph.every:  # llama.cpp's graph has no window, whatever the key says
        terms.pop("window", None)


def _add_rope(
    terms: dict[str, Fact], facts: Facts, graph: Graph, family: Family, factors: np.ndarray | None, problems: list[str]
) -> bool:
    """Add base, turned part and scaling of the rotary embedding; return whether its scaling is known.

    llama.cpp takes scaling without a type for linear, and turns the whole head of a file that tells no part.
    """
    if not graph.rotary:
        terms.pop("theta", None)
        return True
    fixed = f"llama.cpp's {graph.name}"
    theta = terms.get("theta", Fact(_THETA, fixed))
    pair = isinstance(family.theta, list)
    terms["theta"] = Fact([graph.local_theta, theta.value], theta.where) if pair else theta
    turned, head_dim = facts.get("rope.dimension_count"), terms.get("head_dim")
    if turned and "rope_dim" in family.terms:  # latent attention, whose key_length is that of its cache
        terms["rope_dim"], head_dim = turned, turned
        if whole := facts.get("attention.key_length_mla"):
            terms["nope_dim"] = Fact(whole.value - turned.value, f"{whole.where} - {turned.where}")
    if turned and head_dim and (turned.value > head_dim.value or turned.value % 2):
        problems.append(f"{turned}: must be even, and at most {head_dim}")
    share = turned.value / head_dim.value if turned and head_dim else 1.0
    if share != 1 or "partial" in family.rope:
        terms["partial"] = Fact(share, turned.where if turned else fixed)
    kind = facts.get("rope.scaling.type") or Fact("linear", "rope.scaling.factor")
    found = {} if kind.value == "none" else _scaling(kind.value, facts, graph)
    if factors is not None:
        wrong = _misshaped(factors, width.value // 2) if (width := turned or head_dim) else []
        problems += wrong
        if not wrong:  # llama.cpp turns by both where there are two
            found = _llama3(factors, theta.value) if found == {} and "llama3" in graph.scalings else None
        kind = Fact("llama3", ROPE_FREQS)
    if found:
        terms["scaling"] = Fact(found, kind.where)
    return found is not None


def _scaling(kind: str, facts: Facts, graph: Graph) -> dict[str, Any] | None:
    """The scaling of the keys; None if they do not tell all of it."""
    if kind == "linear" and ("rope.scaling.factor" not in facts or facts["rope.scaling.factor"].value == 1):
        return {}
    own = "yarn" in graph.scalings  # llama.cpp's graph multiplies the scores by the square of mscale, and has no other
    names = {"factor": "rope.scaling.factor"}
    if kind == "yarn":
        names["original_max_position_embeddings"] = "rope.scaling.original_context_length"
    if kind not in (("yarn",) if own else ("linear", "yarn")) or not facts.keys() >= {*names.values()}:
        return None
    multiplier = facts.get("rope.scaling.yarn_log_multiplier")
    if own != bool(multiplier and multiplier.value):
        return None
    betas = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")} if kind == "yarn" else {}
    found = {name: facts[key].value for name, key in {**names, **betas}.items() if key in facts}
    if multiplier and own:  # sic: a tenth of it, which llama.cpp's loader multiplies by ten
        found["mscale"] = found["mscale_all_dim"] = _plain(10.0 * multiplier.value)
    return {"rope_type": kind, **found}


def _misshaped(factors: np.ndarray, pairs: int) -> list[str]:
    if factors.dtype != np.float32 or factors.shape != (pairs,):
        is_ = f"{factors.dtype} {factors.shape}"
        return [f"{ROPE_FREQS} is {is_}, and should be float32 ({pairs},), a number for each two that turn"]
    if not (np.isfinite(factors) & (factors > 0)).all():
        return [f"{ROPE_FREQS}: has numbers that are not finite and above zero"]
    return []


def _llama3(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The scaling of Llama 3.1 and later that gives these factors, with its `_LLAMA3`; None if none does.

    Between the wavelengths that stay and those that are divided by the whole factor, each factor tells the original
    length.
    """
    factor, low, high = float(factors.max()), *_LLAMA3.values()
    between = (factors > 1) & (factors < factor)
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    lengths = wavelengths[between] * (low + smooth * (high - low))
    original = round(float(np.median(lengths))) if len(lengths) else ORIGINAL
    given = {"factor": factor, **_LLAMA3, "original_max_position_embeddings": original}
    wanted = llama3_factors(Rope(theta, "llama3", given, theta, 1.0), 2 * len(factors), original)
    return {"rope_type": "llama3", **given} if np.allclose(wanted, factors, rtol=1e-4) else None
