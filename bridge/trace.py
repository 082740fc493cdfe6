"""The structure of an architecture without a table, from its `transformers` class on the meta device; reads no weight.

Matrices are found by what transformers builds (Linear, Conv1D, convolutions, stacked experts), not by their names.
Output heads and routers are kept: the head is what `get_output_embeddings` returns, a router is told by the names that
ModelOpt's presets skip.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bridge.errors import PlanError, fold_layers
from bridge.values import Site, Structure

if TYPE_CHECKING:
    from bridge.sources import Source
    from bridge.sources.live import Origin

# Modules that choose experts: quantizing them changes which experts run (the names are those of ModelOpt's presets).
ROUTERS = ("*router*", "*.gate", "*.shared_expert_gate")


def trace_structure(source: Source) -> Structure:
    """Build the class that the config names without weights and read its structure off; PlanError if it is another."""
    model = _weightless(source.config)
    architecture = str(source.config["architectures"][0])
    from bridge.sources.live import live_names, tied_names

    origins = live_names(model, source.specs)
    _refuse_stacks(origins, model, architecture)
    tied = _checkpoint_ties(tied_names(model), origins)
    ignored = _ignored(model, source, origins, tied)
    _cover(source, model, origins, tied, ignored, architecture)
    sites = _sites(model, origins)
    return Structure(architecture, tuple(sites), _attention(model), tied, ignored, {}, traced=True)


def _weightless(config: Mapping[str, Any]) -> Any:
    import torch

    from bridge.graph.skeleton import build_meta
    from bridge.graph.tasks import resolve_config
    from bridge.sources.loading import model_class

    return build_meta(resolve_config(dict(config)), model_class(config), torch.float32)


def _checkpoint_ties(live: Mapping[str, str], origins: Mapping[str, Origin]) -> dict[str, str]:
    names = {origin.ref.live: name for name, origin in origins.items() if origin.ref}
    return {names.get(alias, alias): names.get(stored, stored) for alias, stored in live.items()}


def _ignored(model: Any, source: Source, origins: Mapping[str, Origin], tied: Mapping[str, str]) -> dict[str, str]:
    """Source tensors that transformers says it does not read: buffers of old versions, heads of another task."""
    import re

    counters = {n: "a counter of training steps" for n in source.specs if n.endswith(".num_batches_tracked")}
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return counters | {
        name: f"{type(model).__name__} ignores it on load"
        for name in source.specs
        if name not in origins and name not in tied and any(re.search(pattern, name) for pattern in patterns)
    }


def _cover(
    source: Source,
    model: Any,
    origins: Mapping[str, Origin],
    tied: Mapping[str, str],
    ignored: Mapping[str, str],
    architecture: str,
) -> None:
    """Every source tensor has a place in the model and the other way round, in the same shape; PlanError lists all."""
    from bridge.sources.live import live_names

    expected = live_names(model)
    lives = {part.live for origin in origins.values() for part in origin.parts}
    extra = [n for n in source.specs if n not in origins and n not in tied and n not in ignored]
    missing = [n for n, o in expected.items() if not {part.live for part in o.parts} & lives and n not in tied]
    shapes = [
        f"{name}: {source.specs[name].shape} where the config gives {origin.spec.shape}"
        for name, origin in origins.items()
        if name in source.specs and source.specs[name].shape != origin.spec.shape
    ]
    problems = [f"{n} is in the checkpoint, but {architecture} has no place for it" for n in fold_layers(extra)]
    problems += [f"{n} is missing from the checkpoint" for n in fold_layers(missing)]
    problems += shapes
    if problems:
        raise PlanError("\n  ".join([f"{source.where} does not fit {architecture}:", *problems]))


def _refuse_stacks(origins: Mapping[str, Origin], model: Any, architecture: str) -> None:
    """Experts that the checkpoint itself stores as one tensor have none of their own to quantize or to read."""
    stacks = {f"{n}.{k}" for n, m in model.named_modules() if hasattr(m, "has_gate") for k in m._parameters}
    refs = {name: origin.ref for name, origin in origins.items()}
    whole = [name for name, ref in refs.items() if ref and not ref.index and ref.live in stacks]
    if whole:
        raise PlanError(
            f"{architecture}: {', '.join(fold_layers(whole))} hold all experts in one tensor; checkpoints with one "
            "tensor per expert (Mixtral, Qwen3-MoE) are supported, stacked ones are not yet"
        )


def _sites(model: Any, origins: Mapping[str, Origin]) -> list[Site]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    layouts: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            layouts[f"{name}.weight"] = "out_in"
        elif isinstance(module, Conv1D):
            layouts[f"{name}.weight"] = "in_out"
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layouts[f"{name}.weight"] = "conv"
        elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):  # transformers' stacked experts
            layouts |= {f"{name}.{key}": "out_in" for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
    heads = _heads(model)
    sites = []
    for name, origin in origins.items():
        live = origin.parts[0]
        layout = layouts.get(live.live)
        if layout is None or not name.endswith(".weight") or (live.expert is None and origin.ref is None):
            continue
        sites.append(_site(name, origin, layout, heads))
    return sites


def _site(name: str, origin: Origin, layout: str, heads: set[str]) -> Site:
    module, live = name.removesuffix(".weight"), origin.parts[0]
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    keep = "output head" if live.live.removesuffix(".weight") in heads else ""
    if not keep and any(fnmatchcase(module, pattern) for pattern in ROUTERS):
        keep = "router"
    half = live.expert is not None and live.rows is not None
    return Site(
        module,
        name,
        layout,
        layer=numbers[0] if numbers else None,
        expert=live.expert,
        keep=keep,
        shares=f"{live.live}[{live.expert}]" if half else "",
    )


def _heads(model: Any) -> set[str]:
    """Output embeddings, and the last matrix of a classifier: outside the base model, one row a label."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    labels = None if "ForCausalLM" in type(model).__name__ else getattr(model.config, "num_labels", None)
    base = f"{model.base_model_prefix}."

    def is_head(name: str, module: Any) -> bool:
        scores = labels is not None and getattr(module, "out_features", None) == labels
        return module is head or (scores and not name.startswith(base))

    return {name for name, module in model.named_modules() if is_head(name, module)}


def _attention(model: Any) -> tuple[str, ...]:
    """Attention modules of a decoder, in layer order: those that are told their place in the cache."""
    found = [(m.layer_idx, n) for n, m in model.named_modules() if isinstance(getattr(m, "layer_idx", None), int)]
    attention = [
        (at, name) for at, name in found if "attn" in name.rpartition(".")[2] or "attention" in name.rpartition(".")[2]
    ]
    return tuple(name for _, name in sorted(attention))
