"""Draft layers, which predict tokens ahead (MTP, NextN).

Servers run them, and no class of transformers has them. They are named `mtp...` or are layers after the last,
`model.layers.61` of 61. Only config and names are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.text import fold_layers, number
from bridge.core.values import Site, Structure, TensorSpec
from bridge.sources.source import Source
from bridge.tables.architectures.meaning import shared

DRAFT = "draft layer"  # why its matrices stay unquantized
_AFTER_LAST = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.(.+)")
_OWN_NAME = re.compile(r"(?:.+\.)?mtp[^.]*(?:\.layers)?(?:\.(\d+))?\.(.+)")
_WEIGHT = re.compile(r"\.(?:weight|weight_packed|qweight)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def promised(config: Mapping[str, Any]) -> int:
    """How many draft layers config.json says that the checkpoint has."""
    return max((part[key] for part in _parts(config) for key in _keys() if isinstance(part.get(key), int)), default=0)


def drafts_among(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """The names that are tensors of draft layers -> the layer's number, -1 without one, and the name in it."""
    layers, drafts = _layers(config), {}
    for name in names:
        if "mtp" in name and (own := _OWN_NAME.fullmatch(name)):
            drafts[name] = (int(own[1] or -1), own[2])
        elif (later := _AFTER_LAST.fullmatch(name)) and int(later[1]) >= layers:
            drafts[name] = (int(later[1]), later[2])
    return drafts


def lacking(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What config.json promises of draft layers and a checkpoint with these tensors does not have.

    A layer after the last has every module of the last, and what joins hidden states and tokens; one with a name of its
    own, the projections of its attention.
    """
    names, count, last = list(names), promised(config), _layers(config) - 1
    drafts = drafts_among(names, config)
    numbers = sorted({at for at, _ in drafts.values() if at >= 0})
    if len(numbers) < count and (numbers or not drafts):
        return [f"{number(count, 'draft layer')}, and tensors of {len(numbers)} are there"]
    own = any("mtp" in name for name in drafts)
    main = {match[2] for name in names if (match := _AFTER_LAST.fullmatch(name)) and int(match[1]) == last}
    stacked = any(".experts." in name and not _EXPERT.search(name) for name in drafts)
    expected = {_WEIGHT.sub("", name) for name in main if _WEIGHT.search(name)}
    expected = {m for m in expected if not (stacked and ".experts." in m) and (not own or _is_projection(m))}
    expected |= set() if own else {"eh_proj", "enorm", "hnorm"}
    missing = []
    for at in numbers if count else ():
        have = {_WEIGHT.sub("", name) for layer, name in drafts.values() if layer == at}
        missing += [f"{module} of draft layer {at}" for module in sorted(expected - have)]
    return missing


def without_promise(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config of an output with these tensors: it promises no draft layers if none of them is of one."""
    if not promised(config) or drafts_among(names, config):
        return dict(config)
    none = dict.fromkeys(_keys(), 0)
    result = dict(config) | {key: none[key] for key in none.keys() & config.keys()}
    if isinstance(text := config.get("text_config"), dict):
        result["text_config"] = text | {key: none[key] for key in none.keys() & text.keys()}
    return result


def with_drafts(structure: Structure, source: Source, options: Any, target: str) -> tuple[Structure, tuple[str, ...]]:
    """The structure as a plan writes it, and the plan's notes: kept draft layers are no longer ignored.

    options: the target's; one without `drafts` has no place for them. PlanError if a layer that is kept is not whole.
    """
    specs, config = source.specs, source.config
    drafts = drafts_among(structure.ignored, config)
    choice = getattr(options, "drafts", None)
    if not drafts:
        lost = number(promised(config), "draft layer")
        note = f"config.json promises {lost}, of which the source has no tensor: the output promises none"
        return structure, (note,) if promised(config) else ()
    count = len({at for at, _ in drafts.values() if at >= 0}) or 1
    what = f"{number(count, 'draft layer')}, {number(len(drafts), 'tensor')},"
    be = "is" if count == 1 else "are"
    if choice is None:
        return structure, (f"{what} {be} left out: target {target} has no place for {'it' if count == 1 else 'them'}",)
    if choice == "drop":
        return structure, (f"{what} {be} left out, and config.json promises none (--drafts drop)",)
    if not promised(config) and not any("mtp" in name for name in drafts):
        return structure, (f"{what} {be} left out: config.json promises none, and servers would refuse them",)
    if missing := fold_layers(lacking(config, specs)):
        raise PlanError(
            "\n  ".join(["the source lacks a part of the draft layers that config.json promises:", *missing])
            + "\n  get the whole checkpoint, or use drafts='drop' (--drafts drop)"
        )
    sites = tuple(site for name, (at, _) in drafts.items() if (site := _site(specs[name], at)))
    ignored = {name: why for name, why in structure.ignored.items() if name not in drafts}
    whole = replace(structure, sites=(*structure.sites, *sites), ignored=ignored)
    return whole, (f"{what} {be} copied as stored (--drafts keep)",)


def _site(spec: TensorSpec, layer: int) -> Site | None:
    """The site of a matrix, so that lists of unquantized modules have it; None of a vector or an embedding."""
    module = spec.name.removesuffix(".weight")
    if len(spec.shape) == 3 and ".experts." in spec.name:
        return Site(module, spec.name, "stack_out_in", layer=layer, keep=DRAFT)
    if len(spec.shape) != 2 or module == spec.name or module.endswith("embed_tokens"):
        return None
    expert = _EXPERT.search(spec.name)
    return Site(module, spec.name, "out_in", layer=layer, expert=int(expert[1]) if expert else None, keep=DRAFT)


def _is_projection(module: str) -> bool:
    return module.startswith("self_attn.") and module.endswith("_proj")


def _keys() -> list[str]:
    return list(shared().section("without_effect")["drafts"])


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def _layers(config: Mapping[str, Any]) -> int:
    """Layers of the language model; without such a number no layer comes after the last."""
    known = (part.get("num_hidden_layers") for part in reversed(_parts(config)))
    return next((count for count in known if isinstance(count, int)), 1 << 31)
