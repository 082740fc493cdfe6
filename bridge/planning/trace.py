"""Trace the structure of an architecture without a table, on fake tensors.

Matrices are found by their class (Linear, Conv1D, convolutions, stacked experts), not by their names. Output heads and
routers stay unquantized: the head is what `get_output_embeddings` returns; a router has a name that ModelOpt's presets
skip, or stands next to `experts`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import partial
from operator import itemgetter
from typing import Any

from torch import nn
from torch._subclasses import fake_tensor
from transformers.pytorch_utils import Conv1D

from bridge.core.errors import PlanError
from bridge.core.text import fold_layers
from bridge.core.values import InputGroup, Site, Structure
from bridge.planning.diffusion import attention_groups
from bridge.planning.diffusion import why_kept as diffusion_kept
from bridge.planning.trace_inputs import Reads, input_reads, unreached_by_chance
from bridge.sources.configs.diffusion import is_diffusion_model
from bridge.sources.live_models.cache_layers import cache_layers, keeps_keys, keeps_states
from bridge.sources.live_models.checkpoint_names import Origin, is_turned, live_modules, live_names, tied_names
from bridge.sources.live_models.meta_device import build_weightless, quiet
from bridge.sources.source import Source
from bridge.tables.architectures.by_table import UNREACHED

# What stays unquantized unless a recipe names it, by the names that ModelOpt's presets skip. Quantized routers change
# which experts run; the recurrent parts are small, and errors in them add up over the sequence.
_KEPT = {
    "output head": ("*output_layer", "*proj_out", "output"),
    "router": ("*router*", "*.gate", "*.gate.wg", "*.shared_expert_gate"),
    "recurrent": ("*mixer.conv1d", "*self_attention.conv1d", "*linear_attn.conv1d", "*linear_attn.in_proj_[ab]*"),
    "draft layers": ("mtp.*",),
}
_IMAGES = {"images": ("*embed_vision*", "*vision_tower*", "*visual*", "*vision_model*", "*multi_modal_projector*")}
MADE = "its matrix is made from others of the checkpoint, or cut, while transformers loads it"
# In names of attention. Nemotron-H and RecurrentGemma give those of their recurrent layers the same ones.
_ATTENTION = ("attn", "attention", "mixer", "temporal_block")
MATRIX = 2  # axes
# Mamba's dt_proj and conv1d, the short convolutions of LFM2, the last matrix of torch's MultiheadAttention (SigLIP).
# The input of such a matrix is unknown, and the model would read its codes as if they were the weight. vLLM does not
# quantize conv1d and dt_proj of its MambaMixer either (vllm 00f8d44).
NEVER_RUN = "its module never runs: the model reads the weight itself"
# Of stacks of a class's own kind (JetMoE), ModelOpt has no quantizers, and no server has a model.
OWN_EXPERTS = "experts of a kind that no program is known to read quantized"
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # the stacks of `use_experts_implementation`, and of Llama 4
_ROUTERS = ("gate", "router", "shared_expert_gate")  # children of a module that also has `experts`


def trace_structure(source: Source) -> Structure:
    """Build the config's class without weights and read off its structure; PlanError if the checkpoint has another."""
    model, mode = build_weightless(source)
    architecture = str(source.config["architectures"][0])
    saved = live_names(model)
    known = all(name in saved and saved[name].spec.shape == spec.shape for name, spec in source.specs.items())
    origins = {name: saved[name] for name in source.specs} if known else live_names(model, source.specs)
    ties, names = tied_names(model), {origin.ref.live: name for name, origin in origins.items() if origin.ref}
    tied = {names.get(alias, alias): names.get(stored, stored) for alias, stored in ties.items()}
    ignored = _ignored(model, source, origins, tied)
    _cover(source, saved, origins, tied, ignored, architecture)
    order = _order(origins, model, [alias for alias in ties if alias not in names])
    place = {name: at for at, name in enumerate(order)}
    sites = [*_sites(model, origins), *_tied_heads(model, tied, names)]
    sites.sort(key=lambda site: place[site.weight if site.stacked else f"{site.module}.weight"])
    modules = _modules(origins)
    embeddings, layers = _embeddings(model, modules), cache_layers(model.config)
    groups, never_run, unreached, ungrouped = _reads(model, mode, modules, {site.module for site in sites})
    sites = [replace(site, keep=site.keep or NEVER_RUN) if site.module in never_run else site for site in sites]
    sites = [replace(site, unreached=unreached.get(site.module, "")) for site in sites]
    return Structure(
        architecture,
        tuple(sites),
        _attention(model, layers, origins),
        tied,
        ignored,
        groups=groups,
        order=order,
        embeddings=embeddings,
        ungrouped=ungrouped,
        traced=True,
        joined=_joined(model, origins),
        states=any(map(keeps_states, layers)),
    )


def _ignored(model: Any, source: Source, origins: Mapping[str, Origin], tied: Mapping[str, str]) -> dict[str, str]:
    """Source tensors that transformers does not read: buffers of old versions, heads of another task."""
    counters = {n: "a counter of training steps" for n in source.specs if n.endswith(".num_batches_tracked")}
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return counters | {
        name: f"{type(model).__name__} ignores it on load"
        for name in source.specs
        if name not in origins and name not in tied and any(re.search(pattern, name) for pattern in patterns)
    }


def _cover(
    source: Source,
    expected: Mapping[str, Origin],
    origins: Mapping[str, Origin],
    tied: Mapping[str, str],
    ignored: Mapping[str, str],
    architecture: str,
) -> None:
    """Check that checkpoint and model have the same tensors in the same shapes; PlanError lists all differences."""
    lives = {part.live for origin in origins.values() for part in origin.parts}
    extra = [n for n in source.specs if n not in origins and n not in tied and n not in ignored]
    missing = [n for n, o in expected.items() if not {part.live for part in o.parts} & lives and n not in tied]
    shapes = [
        f"{name} has shape {source.specs[name].shape}, but the config gives {origin.spec.shape}"
        for name, origin in origins.items()
        if name in source.specs and source.specs[name].shape != origin.spec.shape
    ]
    problems = [f"{n} is in the checkpoint, but {architecture} has no place for it" for n in fold_layers(extra)]
    problems += [f"{n} is missing from the checkpoint" for n in fold_layers(missing)]
    problems += shapes
    if problems:
        raise PlanError("\n  ".join([f"{source.where} does not fit {architecture}:", *problems]))


def _order(origins: Mapping[str, Origin], model: Any, aliases: list[str]) -> tuple[str, ...]:
    """Every tensor in the order of the model's modules; of stacked experts all of the first, then all of the next."""
    at = {name: number for number, name in enumerate(model.state_dict())}
    stacks: dict[str, int] = {}
    for part in (part for origin in origins.values() for part in origin.parts if part.expert is not None):
        module = part.live.rpartition(".")[0]
        stacks[module] = min(stacks.get(module, at[part.live]), at[part.live])
    keys = {}
    for name, origin in origins.items():
        part = min(origin.parts, key=lambda part: at[part.live])
        start = at[part.live] if part.expert is None else stacks[part.live.rpartition(".")[0]]
        keys[name] = (start, -1 if part.expert is None else part.expert, at[part.live], part.rows or (0, 0))
    keys |= {alias: (at[alias], -1, at[alias], (0, 0)) for alias in aliases}
    return tuple(sorted(keys, key=lambda name: keys[name]))


def _modules(origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """Live module -> the checkpoint modules of its weight: several if the model joins them. Without stacked experts."""
    modules: dict[str, dict[str, tuple[int, int]]] = {}
    for name, origin in origins.items():
        for part in origin.parts:
            if part.live.endswith(".weight") and part.expert is None:
                rows = modules.setdefault(part.live.removesuffix(".weight"), {})
                rows[name.removesuffix(".weight")] = part.rows or (0, 0)
    return {live: tuple(sorted(rows, key=lambda name: rows[name])) for live, rows in modules.items()}


def _embeddings(model: Any, modules: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Modules that only look up: an embedding's subclass with its own `forward` may do more."""
    embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    plain = [name for name, module in embeddings if type(module).forward is nn.Embedding.forward]
    return tuple(name for live in plain for name in modules.get(live, (live,)))


def _reads(
    model: Any, mode: Any, modules: Mapping[str, tuple[str, ...]], sites: set[str]
) -> tuple[tuple[InputGroup, ...], set[str], dict[str, str], str]:
    """Groups that share an input, modules that never run, and why others are not reached; or why all is unknown.

    In checkpoint names.
    """
    if not is_diffusion_model(model) and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the others choose experts by values
    fake_tensor.log.disabled = True  # it prints a traceback of an error that is one line here
    why = ""
    try:
        with quiet():
            reads = input_reads(model, mode)
    except Exception as error:
        why = f"{type(model).__name__} does not run on fake tensors: {type(error).__name__}: {error}"
        reads = _by_chance(model, mode)
    finally:
        fake_tensor.log.disabled = False
    groups = []
    for group in () if why else reads.groups:
        readers = tuple(name for live in group.modules for name in modules.get(live, (live,)) if name in sites)
        if len(readers) > 1:
            norm = next(iter(modules.get(group.norm, ())), "")
            groups.append(InputGroup(readers, norm, group.alone and bool(norm), group.plus_one and bool(norm)))
    never_run = {name for live in reads.never_run for name in modules.get(live, (live,))}
    told = UNREACHED.format(inputs=" and ".join(reads.inputs))
    unreached = {name: told for live in reads.unreached for name in modules.get(live, (live,))}
    return tuple(attention_groups(groups) if is_diffusion_model(model) else groups), never_run, unreached, why


def _by_chance(model: Any, mode: Any) -> Reads:
    """What is known of a model that chooses by values: what no example is likely to reach, and no groups."""
    try:
        with quiet():
            return unreached_by_chance(model, mode)
    except Exception:  # it does not run at all
        return Reads((), ())


def _sites(model: Any, origins: Mapping[str, Origin]) -> list[Site]:
    layouts: dict[str, str] = {f"{name}.weight": "out_in" for name in _routers(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            layouts[f"{name}.weight"] = "out_in"
        elif isinstance(module, Conv1D):
            layouts[f"{name}.weight"] = "in_out"
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layouts[f"{name}.weight"] = "conv"
    layouts |= _stacks(model)
    heads = _heads(model)
    why_kept = _why_kept(model)
    sites = []
    for name, origin in origins.items():
        live = origin.parts[0]
        expert = live.expert is not None and len(origin.spec.shape) == 2  # one of a stack
        layout = "out_in" if expert else layouts.get(live.live)
        if layout is None or (live.expert is None and origin.ref is None and layout != "out_in"):
            continue
        if not name.endswith(".weight") and not layout.startswith("stack"):
            continue
        if live.order == (0, 2, 1):  # stored otherwise than the model has it
            layout = "stack_in_out"
        module = live.live.removesuffix(".weight")
        reason = why_kept(module) or why_kept(name.removesuffix(".weight"))
        reason = reason or ("" if origin.ref or expert else MADE)
        if layout.startswith("stack") and not module.endswith(_EXPERTS):
            reason = reason or OWN_EXPERTS
        site = _site(name, origin, layout, "output head" if module in heads else reason)
        sites.append(replace(site, live=_live(site, origin)))
    return sites


def _live(site: Site, origin: Origin) -> tuple[str, ...]:
    """The modules of the model that hold a site's weight, if they have other names; a stack is none."""
    weights = (part.live for part in origin.parts if part.live.endswith(".weight") and part.expert is None)
    return tuple(dict.fromkeys(module for name in weights if (module := name[: -len(".weight")]) != site.module))


def _why_kept(model: Any) -> Callable[[str], str]:
    """The function that gives the reason why a module of `model` is kept by its name; "" for none."""
    if is_diffusion_model(model):
        return partial(diffusion_kept, type(model).__name__)
    kept = _KEPT | (_IMAGES if model.main_input_name == "input_ids" else {})
    patterns = {why: re.compile("|".join(map(translate, globs))) for why, globs in kept.items()}
    return lambda module: next((why for why, pattern in patterns.items() if pattern.match(module)), "")


def _stacks(model: Any) -> dict[str, str]:
    """Layouts of the tensors that hold all experts of a layer, for checkpoints that store them like that."""
    layouts: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") or "Experts" in type(module).__name__:
            layout = "stack_in_out" if is_turned(module) else "stack_out_in"
            tensors = [(key, tensor) for key, tensor in module._parameters.items() if tensor is not None]
            layouts |= {f"{name}.{key}": layout for key, tensor in tensors if tensor.ndim > MATRIX}
    return layouts


def _joined(model: Any, origins: Mapping[str, Origin]) -> dict[str, str]:
    """Stored stacks whose matrices are gate and up of an expert -> how these lie, see `Structure.joined`."""
    joined = {}
    for name, origin in origins.items():
        module, _, key = origin.parts[0].live.rpartition(".")
        if key == "gate_up_proj" and origin.parts[0].expert is None and len(origin.spec.shape) > MATRIX:
            joined[name] = "halves" if getattr(model.get_submodule(module), "is_concatenated", True) else "pairs"
    return joined


def _tied_heads(model: Any, tied: Mapping[str, str], names: Mapping[str, str]) -> list[Site]:
    """Sites of heads whose weight is stored as the embedding. `names`: tensors of the model -> of the checkpoint."""
    sites = []
    for head in sorted(_heads(model)):
        alias = names.get(f"{head}.weight", f"{head}.weight")
        if stored := tied.get(alias):
            module = alias.removesuffix(".weight")
            live = () if module == head else (head,)
            sites.append(Site(module, stored, "out_in", keep=f"output head, tied to {stored}", live=live))
    return sites


def _site(name: str, origin: Origin, layout: str, keep: str) -> Site:
    live = origin.parts[0]
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    half = live.expert is not None and live.rows is not None
    return Site(
        name.removesuffix(".weight"),
        name,
        layout,
        layer=numbers[0] if numbers else None,
        expert=live.expert,
        keep=keep,
        shares=f"{live.live}[{live.expert}]" if half else "",
    )


def _routers(model: Any) -> set[str]:
    """Routers that are not a Linear: they hold a matrix and stand next to the experts."""
    routers = set()
    for name, module in model.named_modules():
        for key in _ROUTERS if hasattr(module, "experts") else ():
            weight = getattr(getattr(module, key, None), "weight", None)
            if weight is not None and weight.ndim == 2:
                routers.add(f"{name}.{key}")
    return routers


def _heads(model: Any) -> set[str]:
    """Output embeddings, and the last matrix of a classifier: outside the base model, with one row per label.

    The labels of CTC are the vocabulary; Parakeet's head is a convolution.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    labels = None if "ForCausalLM" in kind else getattr(model.config, "num_labels", None)
    labels = getattr(model.config, "vocab_size", None) if kind.endswith("ForCTC") else labels
    base = f"{getattr(model, 'base_model_prefix', '')}."

    def is_head(name: str, module: Any) -> bool:
        rows = getattr(module, "out_features", getattr(module, "out_channels", None))
        scores = labels is not None and rows == labels
        return module is head or (scores and not name.startswith(base))

    return {name for name, module in model.named_modules() if is_head(name, module)}


def _attention(model: Any, layers: Sequence[type], origins: Mapping[str, Origin]) -> tuple[str, ...]:
    """Attention modules with a place in the KV cache, in layer order and in checkpoint names.

    `layers`: what the cache keeps of each. Linear attention keeps a state instead of keys and values.
    """
    states = {at for at, kind in enumerate(layers) if keeps_states(kind) and not keeps_keys(kind)}
    modules = []
    for name, module in model.named_modules():
        kind = name.rstrip(".0123456789").rpartition(".")[2]  # one of two in a layer is `self_attn.1`
        at = _place_in_cache(module)
        if isinstance(at, int) and at not in states and any(word in kind for word in _ATTENTION):
            modules.append((at, name))
    inner = [(at, name) for at, name in modules if not any(other.startswith(f"{name}.") for _, other in modules)]
    stored = live_modules(origins)
    inner.sort(key=itemgetter(0))  # stable: what layers share (Zamba 2) has one place, and stays in module order
    return tuple(ours for _, live in inner for ours in stored.get(live, (live,)))


def _place_in_cache(module: Any) -> Any:
    """The layer whose keys and values a module caches; GPT-Neo calls it `layer_id`, as do encoders without a cache."""
    if hasattr(module, "layer_idx") or not hasattr(module, "layer_id"):
        return getattr(module, "layer_idx", None)
    return module.layer_id if "layer_past" in inspect.signature(module.forward).parameters else None
