"""Draft layers, which predict tokens ahead (MTP, NextN).

Servers run them, and no class of transformers has them. They are named `mtp...` or are layers after the last,
`model.layers.61` of 61. Only config and names are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.core.mappings import mappings, read_table
from bridge.core.text import fold_layers, nearest, number
from bridge.core.values import InputGroup, Site, Structure, TensorSpec
from bridge.planning.plan import PASSTHROUGH
from bridge.quant.schemes.scheme import DRAFT_ROLE, Scheme
from bridge.sources.source import Source
from bridge.tables.architectures.meaning import shared

DRAFT = "draft layer"  # why a matrix stays unquantized: all of them, or one that no main layer has, which programs
# take unquantized: what joins hidden states and tokens, and the head
UNMEASURED = (
    "no class of transformers runs draft layers, so that their inputs cannot be measured; use a scheme without stored "
    "scales of inputs (int4_wo, int8_wo, fp8_pc_pt, fp8_block), for layers beside others by a rule of "
    "a recipe with roles = [\"draft.*\"], or drafts='keep' (--drafts keep)"
)
CHOICES = ("keep", "quantize", "drop")
_AFTER_LAST = re.compile(r"(?:model\.|language_model\.|backbone\.)*layers\.(\d+)\.(.+)")
_OWN_NAME = re.compile(r"(?:.+\.)?mtp[^.]*(?:\.layers)?(?:\.(\d+))?\.(.+)")
_WEIGHT = re.compile(r"\.(?:weight|weight_packed|qweight)$")
_EXPERT_OF, _MLP = re.compile(r"(?:^|\.)experts\."), re.compile(r"(?:^|\.)(?:mlp|feed_forward|block_sparse_moe)\.")
_DENSE = re.compile(r"(?:^|\.)(?:mlp|feed_forward)\.\w+_proj$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SINGLE, _STACK = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)"), re.compile(r"\bexperts\.[a-z]\w*_proj$")
_BIAS = re.compile(r"(?:\.bias|_correction_bias)$")


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
    """What the draft layers of a checkpoint with these tensors lack.

    A layer needs the modules of that layer of the model which it is most like, and what joins hidden states and tokens:
    after the last layer as DeepSeek has it, under a name of its own by `mappings/exports.toml`, if its class is there;
    of other classes it has the projections of its attention. Without a promise of config.json only layers with a name
    of their own are looked at.
    """
    names, count = list(names), promised(config)
    drafts = drafts_among(names, config)
    own = any("mtp" in name for name in drafts)
    joining = _joining(config) or ([] if own else _joining({"architectures": ["DeepseekV3"]})[:3])
    numbers = sorted({at for at, _ in drafts.values() if at >= 0})
    count = max(count, 1) if joining and drafts and own else count
    if len(numbers) < count and (numbers or joining or not drafts):
        there = f"tensors of {len(numbers)} are" if numbers else "no layer is" if drafts else "no tensor is"
        return [f"of {number(count, 'draft layer')} {there} there"]
    main: dict[int, set[str]] = {}
    for name in names:
        if (match := _AFTER_LAST.fullmatch(name)) and name not in drafts:
            main.setdefault(int(match[1]), set()).update(_parts_of(match[2]))
    modules = {part for name in names for part in _parts_of(name)}
    missing = []
    for at in numbers[: count if not own else None] if count else ():
        have = {part for layer, name in drafts.values() if layer == at for part in _parts_of(name)}
        root = next(name.removesuffix(f".{within}") for name, (layer, within) in drafts.items() if layer == at)
        like = max(sorted(main, reverse=True), key=lambda layer: len(main[layer] & have), default=-1)
        lacks = _as_stored(main.get(like, set()), have) - have
        if not joining:
            lacks = {part for part in lacks if _is_projection(part)}
        elif any(map(_EXPERT_OF.search, lacks)) and _is_dense(have):
            lacks = {part for part in lacks if not _MLP.search(part)}
        missing += [f"{part} of draft layer {at}" for part in sorted(lacks)]
        before = root.partition("mtp")[0]
        needed = [word.format(name=root, n=at) for word in joining if "{n}" in word or "{name}" in word]
        needed = [name if name.startswith(f"{root}.") else before + name for name in needed]
        missing += [name.removeprefix(f"{root}.") + f" of draft layer {at}" for name in needed if name not in modules]
    for word in joining if numbers and count else ():
        name = next(iter(drafts)).partition("mtp")[0] + word.format(name="", n="", last=numbers[-1])
        if "{n}" not in word and "{name}" not in word and name not in modules:
            missing.append(f"{name} of the draft layers")
    return missing


def unpromised(config: Mapping[str, Any], drafts: Mapping[str, tuple[int, str]]) -> list[str]:
    """The tensors of layers after the last that config.json does not count as draft layers: servers refuse them."""
    end = _layers(config) + promised(config)
    return [name for name, (at, _) in drafts.items() if at >= end and "mtp" not in name]


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
    """The structure as a plan writes it, and the plan's notes: draft layers that are written are no longer ignored.

    options: the target's; one without `drafts` has no place for them. PlanError if a layer that is written is not
    whole, or if nothing of one that should be quantized can be.
    """
    specs, config = source.specs, source.config
    drafts = drafts_among(structure.ignored, config)
    choice = getattr(options, "drafts", None)
    if choice in ("quantize", "drop") and any(site.unreached == UNMEASURED for site in structure.sites):
        raise PlanError(
            f"{structure.architecture} is a draft of its own, which the scheme quantizes as it does a model; "
            f"leave drafts='{choice}' (--drafts) out"
        )
    if not drafts:
        if choice == "quantize":
            raise PlanError("the source has no draft layers to quantize; leave drafts='quantize' (--drafts) out")
        lost = number(promised(config), "draft layer")
        note = (
            f"config.json declares {lost}, but the source has no tensors of it: config.json of the output declares none"
        )
        return structure, (note,) if promised(config) else ()
    what, be = _counted(drafts)
    if choice is None:
        return structure, (f"{what} {be} left out: target {target} has no place for {'it' if be == 'is' else 'them'}",)
    if choice == "drop":
        return structure, (f"{what} {be} left out, and config.json promises none (--drafts drop)",)
    quantizes = choice == "quantize"
    notes: tuple[str, ...] = ()
    if extra := unpromised(config, drafts):
        what, be = _counted({name: drafts[name] for name in extra})
        why = f"config.json promises {promised(config) or 'none'}, and servers would refuse more"
        notes = (f"{what} {be} left out: {why}",)
        if quantizes and len(extra) == len(drafts):
            raise PlanError(
                f"{what} {be} not quantized: {why}; leave drafts='quantize' (--drafts) out, or set "
                "num_nextn_predict_layers in config.json"
            )
        drafts = {name: place for name, place in drafts.items() if name not in extra}
        if not drafts:
            return structure, notes
        what, be = _counted(drafts)
    if missing := fold_layers(lacking(config, specs)):
        raise PlanError(
            "\n  ".join(["the source has not all tensors of its draft layers:", *missing])
            + "\n  get the whole checkpoint, or use drafts='drop' (--drafts drop)"
        )
    whole = _with_sites(structure, specs, config, drafts, quantizes)
    if quantizes and all(site.keep for site in whole.sites[len(structure.sites) :]):
        raise PlanError(
            f"{what} {be} not like the other layers: no matrix there has the name of one here, whose format it would "
            "take; use drafts='keep' (--drafts keep)"
        )
    if quantizes:
        return whole, (*notes, f"{what} {be} quantized as the layers before, rounded to nearest (--drafts quantize)")
    stored = "copied as stored" if source.quantized is None else "copied, with codes if those of the source are copied"
    return whole, (*notes, f"{what} {be} {stored} (--drafts keep)")


def module_of(name: str) -> str:
    """The module of a weight, or of its codes under the names of other formats; else the name."""
    return _WEIGHT.sub("", name)


def _counted(drafts: Mapping[str, tuple[int, str]]) -> tuple[str, str]:
    """How many layers and tensors, and the verb for so many layers."""
    count = len({at for at, _ in drafts.values() if at >= 0}) or 1
    return f"{number(count, 'draft layer')}, {number(len(drafts), 'tensor')},", "is" if count == 1 else "are"


def check_choice(choice: str, scheme: Scheme | None) -> None:
    """UsageError if `drafts` is an unknown word, or quantizes without a scheme."""
    if choice not in CHOICES:
        raise UsageError(f"drafts {choice!r} is unknown; {nearest(choice, CHOICES)}")
    if choice == "quantize" and (scheme is None or scheme.name == PASSTHROUGH):
        raise UsageError("drafts='quantize' (--drafts) needs a scheme too; pass quant='int4_wo', for example")


def asked_as(module: str, at: int, layers: int) -> Iterator[str]:
    """Yield other names under which programs ask whether a module of draft layer `at` is quantized.

    layers: of the model, without those that draft.
    """
    number = at if at >= layers else at + layers
    matches = ((pattern.fullmatch(module), names) for pattern, names in _asked_rows())
    match, names = next((pair for pair in matches if pair[0]), (None, []))
    own = [name.format(n=number, module=match["module"]) for name in names if match]
    yield from own
    for name in (module, *own):
        parent, _, last = name.rpartition(".")
        if not _EXPERT.search(f"{name}."):
            yield from (f"{parent}.{fused}" for fused in _exports("fused").get(last, ()))


def is_note(note: str) -> bool:
    """Whether a note of a plan says what is written of draft layers."""
    return bool(re.match(r"(?:config\.json promises )?\d+ draft layers?, ", note))


def check_rules(scheme: Scheme | None, structure: Structure) -> None:
    """SchemeError if a rule quantizes draft layers, and the structure of a plan has none that are quantized."""
    rules = [rule.label for rule in scheme.rules if rule.of_drafts and rule.format] if scheme else []
    if rules and not any(site.unreached == UNMEASURED for site in structure.sites):
        raise SchemeError(
            f"{', '.join(rules)}: no draft layer is quantized here; leave the rule out, or use drafts='quantize' "
            "(--drafts quantize) with a model that has draft layers"
        )


def _with_sites(
    structure: Structure,
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    drafts: Mapping[str, tuple[int, str]],
    quantizes: bool,
) -> Structure:
    """The structure with the matrices of draft layers; if they are quantized, as those of the last layers are."""
    like = {match[2]: site for site in structure.sites if (match := _AFTER_LAST.fullmatch(site.weight))}
    layers, sites, joined = _layers(config), [], dict(structure.joined)
    roots: dict[str, str] = {}  # module of a quantized matrix -> what its name begins with before that in the layer
    for name, (at, within) in drafts.items():
        site, root = _site(specs[name]), name.removesuffix(within)
        if quantizes and (main := like.get(within)):
            site = replace(
                main,
                module=root + _within(main.module),
                weight=name,
                layer=None,  # rules with `layers` are about the main layers
                roles=() if main.keep else tuple(f"{DRAFT_ROLE}{role}" for role in main.roles),  # no router
                shares=main.shares and f"{root}{main.expert}",
                unreached=UNMEASURED,
                live=(),  # no class of transformers has it
            )
            joined |= {name: joined[main.weight]} if main.weight in joined else {}
            roots[site.module] = root
        if site:
            sites.append(replace(site, asked=tuple(asked_as(site.module, at, layers))))
    whole = replace(
        structure,
        sites=(*structure.sites, *sites),
        ignored={name: why for name, why in structure.ignored.items() if name not in drafts},
    )
    if not quantizes:
        return whole
    embeddings = [name.removesuffix(".weight") for name in drafts if name.endswith("embed_tokens.weight")]
    return replace(
        whole,
        joined=joined,
        groups=(*structure.groups, *_groups(structure.groups, roots)),
        singles=(*structure.singles, *_groups(structure.singles, roots)),
        order=(*structure.order, *drafts),
        embeddings=(*structure.embeddings, *embeddings),
    )


def _groups(groups: Iterable[InputGroup], roots: Mapping[str, str]) -> Iterator[InputGroup]:
    """The groups that modules of draft layers form as those of the last layers do."""
    by_first = {_within(group.modules[0]): group for group in groups if _AFTER_LAST.fullmatch(group.modules[0])}
    for module, root in roots.items():
        if group := by_first.get(module.removeprefix(root)):
            members = tuple(root + _within(member) for member in group.modules)
            norm = root + _within(group.norm) if _AFTER_LAST.fullmatch(group.norm) else ""
            if roots.keys() >= set(members):
                yield replace(group, modules=members, norm=norm)


def _within(module: str) -> str:
    """The name of a module of a layer within the layer."""
    match = _AFTER_LAST.fullmatch(module)
    return match[2] if match else module


def _site(spec: TensorSpec) -> Site | None:
    """The site of a matrix, so that lists of unquantized modules have it; None of a vector or an embedding."""
    module = spec.name.removesuffix(".weight")
    if len(spec.shape) == 3 and ".experts." in spec.name:
        return Site(module, spec.name, "stack_out_in", keep=DRAFT)
    if len(spec.shape) != 2 or module == spec.name or module.endswith("embed_tokens"):
        return None
    expert = _EXPERT.search(spec.name)
    return Site(module, spec.name, "out_in", expert=int(expert[1]) if expert else None, keep=DRAFT)


@cache
def _exports(section: str) -> dict[str, list[str]]:
    """A section of mappings/exports.toml."""
    return read_table(mappings() / "exports.toml").section(section)


@cache
def _asked_rows() -> list[tuple[re.Pattern[str], list[str]]]:
    """The rows of [asked] of mappings/exports.toml: the name in a file, with an expression for its parts -> names."""
    parts = {r"\{n\}": r"\d+", r"\{module\}": "(?P<module>.+)"}
    patterns = []
    for name, asked in _exports("asked").items():
        pattern = re.escape(name)
        for part, expression in parts.items():
            pattern = pattern.replace(part, expression)
        patterns.append((re.compile(pattern), asked))
    return patterns


def _joining(config: Mapping[str, Any]) -> list[str]:
    """What joins hidden states and tokens in a class's draft layers: names of modules; [] of a class without a row."""
    known = config.get("architectures")
    name = str(known[0]) if isinstance(known, list) and known else ""
    return next((words for begin, words in _exports("drafts").items() if name.startswith(begin)), [])


def _parts_of(name: str) -> tuple[str, ...]:
    """The module of a weight, codes or a stack of experts, or the name of a bias; scales belong to them."""
    if _WEIGHT.search(name):
        return (module_of(name),)
    return (name,) if _BIAS.search(name) or _STACK.search(name) else ()


def _as_stored(parts: set[str], have: set[str]) -> set[str]:
    """What a layer of the model has, with experts as a draft layer has them: each with its own matrices, or stacked."""
    stacks = {part for part in parts if _STACK.search(part)}
    single = {match.groups() for part in have if (match := _SINGLE.fullmatch(part))}
    if stacks and single:
        count = 1 + max(int(expert) for _, expert, _ in single)
        wanted = {f"{at}.{n}.{word}" for at, _, word in single for n in range(count)}
        return parts - stacks | wanted
    if not stacks and any(map(_STACK.search, have)):
        blocks = {match[1] for part in parts if (match := _SINGLE.fullmatch(part))}
        plain = {part for part in parts if not _SINGLE.fullmatch(part)}
        return plain | {f"{block}.{word}" for block in blocks for word in ("gate_up_proj", "down_proj")}
    return parts


def _is_dense(parts: set[str]) -> bool:
    return not any(map(_EXPERT_OF.search, parts)) and any(map(_DENSE.search, parts))


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
