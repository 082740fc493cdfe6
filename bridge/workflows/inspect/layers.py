"""Layers of a model that can be inspected: names and roles.

A layer is one matrix that inputs are multiplied by: a Linear, a Conv1D, a convolution, a module of Megatron-Core, or
one expert of a stack. Roles come from the architecture's table (transformers), or from the dialect whose rows match
most parameters (Megatron-Core, torchtitan), if it knows more than half: a parameter without a row takes the rows of
the state's keys in the same module, since torchtitan saves `wqkv` as three tensors. Without either, layers have names
only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.core.errors import BridgeError
from bridge.core.values import Site
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import architecture_of
from bridge.tables.architectures.roles import load_roles
from bridge.tables.architectures.structure import layout_of
from bridge.tables.dialects.dialect import Dialect, DialectRow, dialect_names, load_dialect
from bridge.tables.dialects.translate import row_pattern
from bridge.workflows.inspect.changes.gemms import why_fixed

if TYPE_CHECKING:
    from bridge.sources.source import Source

LINEAR, CONV1D, CONV, EXPERT = "linear", "conv1d", "conv", "expert"  # kinds of layers
MATRICES = ("linear", "head", "router")  # kinds of roles that a layer may have
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # parts that torch puts into names
_NUMBER = re.compile(r"(?<!fc)(?<!\d)\d+")  # not that of `fc1`, as in nvdlfw-inspect
INSIDE = "an expert inside one module"
_NUMBERED = re.compile(r"weight\d+")
_NUMBER_PART = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Layer:
    """A matrix of the model: its name in configs and results, its roles (several if fused), its number, its kind.

    `module`, `parameter`: where the live model has its weight. `expert`: its index in a stack, None outside one.
    `turned`: whether the weight is stored [in, out]. `fixed`: why what its GEMMs take cannot be changed; "" if it can.
    """

    name: str
    roles: tuple[str, ...] = ()
    number: int | None = None
    kind: str = LINEAR
    module: str = ""
    parameter: str = "weight"
    expert: int | None = None
    turned: bool = False
    fixed: str = field(default="", compare=False)

    @property
    def role(self) -> str:
        """Its roles in one text, "" without any: "attn.q + attn.k + attn.v" for a fused matrix."""
        return " + ".join(role.removesuffix(".weight") for role in self.roles)


@dataclass(frozen=True)
class Meaning:
    """What a table says of a live parameter, or of one expert of a stack."""

    roles: tuple[str, ...]
    number: int | None
    turned: bool = False


Meanings = Mapping[tuple[str, int | None], Meaning]  # by live parameter and expert


def clean(name: str) -> str:
    """A live name without the parts that wrappers of single layers put into it.

    >>> clean("layers.0._orig_mod.attention.wq")
    'layers.0.attention.wq'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def expert_name(module: str, expert: int, parameter: str) -> str:
    """The name of a layer that is one expert of a stack.

    >>> expert_name("layers.0.mlp.experts", 3, "gate_up_proj")
    'layers.0.mlp.experts.3.gate_up_proj'
    """
    return f"{module}.{expert}.{parameter}"


def number_in(name: str) -> int | None:
    """The first number of a name, which is its layer's where no table says so.

    >>> number_in("decoder.layers.3.mlp.fc1"), number_in("transformer_layer.layernorm_mlp.fc1")
    (3, None)
    """
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def layers_of(model: Any, source: Source | None = None) -> tuple[Layer, ...]:
    """The layers of a live model, in its order; `source`: what it was loaded from."""
    model = unwrapped(model)
    structured = source is not None or _is_transformers(model)
    meanings = _of_structure(model, source) if structured else dialect_meanings(model)
    return tuple(layer for name, module in model.named_modules() for layer in _layers(name, module, meanings))


def not_listed(model: Any) -> list[str]:
    """Names of modules of Megatron-Core that hold the matrices of experts in another way: GroupedMLP, GroupedLinear."""
    return [
        clean(name)
        for name, module in unwrapped(model).named_modules()
        if "Grouped" in type(module).__name__ and any(_NUMBERED.fullmatch(key) for key in module._parameters)
    ]


def unwrapped(model: Any) -> Any:
    """A model without the wrappers for compilation and parallel training, which keep it as a child."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if _is_parallel(model) else None)
        if inner is None:
            return model
        model = inner


def _is_parallel(model: Any) -> bool:
    return [name for name, _ in model.named_children()] == ["module"] and not model._parameters


def _layers(name: str, module: Any, meanings: Meanings) -> Iterator[Layer]:
    """The layers whose weight a module has."""
    shown = clean(name)
    weight = module._parameters.get("weight")
    kind = _kind(module)
    meaning = meanings.get((f"{shown}.weight", None))
    if kind or (meaning and weight is not None and weight.ndim == 2 and not _is_router(meaning)):
        yield _layer(shown, meaning, kind or LINEAR, module=name, fixed=why_fixed(module))
        return
    for parameter, tensor in module._parameters.items():
        if tensor is None or tensor.ndim != 3:
            continue
        key = f"{shown}.{parameter}"
        if (key, 0) in meanings or (key, None) in meanings or type(module).__name__.endswith("Experts"):
            for expert in range(tensor.shape[0]):
                meaning = meanings.get((key, expert)) or meanings.get((key, None))
                if meaning is None and getattr(module, "is_transposed", False):
                    meaning = Meaning((), None, turned=True)
                one = expert_name(shown, expert, parameter)
                yield _layer(one, meaning, EXPERT, module=name, parameter=parameter, expert=expert, fixed=INSIDE)


def _layer(name: str, meaning: Meaning | None, kind: str, **place: Any) -> Layer:
    """A layer with what a table says of it.  place: where the live model has its weight."""
    said = meaning or Meaning((), None)
    number = number_in(name) if said.number is None else said.number
    return Layer(name, said.roles, number, kind, turned=kind == CONV1D or (kind == EXPERT and said.turned), **place)


def _kind(module: Any) -> str:
    """The kind of a torch or transformers module with one weight, "" for any other."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return CONV
    is_conv1d = any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )
    return CONV1D if is_conv1d else ""


def _is_router(meaning: Meaning) -> bool:
    """Whether a module chooses experts: its output is not that of a GEMM."""
    return any(load_roles().roles[role].kind == "router" for role in meaning.roles)


def _is_transformers(model: Any) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def _of_structure(model: Any, source: Source | None) -> Meanings:
    """Meanings by the architecture's table; none if there is no table, or the model does not fit it."""
    from bridge.sources.live_models.checkpoint_names import live_names
    from bridge.sources.memory import open_model
    from bridge.tables.architectures.structure import structure

    model = _without_wrappers(model)
    try:
        source = source or open_model(model)
        if load_arch(architecture_of(source.config)) is None:
            return {}
        sites = structure(source.config, source.specs).sites
        origins = live_names(model, source.specs)
    except BridgeError:
        return {}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    meanings: dict[tuple[str, int | None], Meaning] = {}
    for site in sites:
        if f"{site.module}.weight" in own:  # a tied head, too, whose weight is stored as the embedding
            _add(meanings, (f"{site.module}.weight", None), site)
        elif site.weight in origins:
            for part in origins[site.weight].parts:
                _add(meanings, (part.live, part.expert), site, part.order == (1, 0))
    return meanings


def _without_wrappers(model: Any) -> Any:
    """The model, or a copy without weights if wrappers of its blocks (compilation, FSDP) put parts into its names."""
    if all(clean(name) == name for name, _ in model.named_modules()):
        return model
    from bridge.sources.live_models.meta_device import build_meta, resolve_config

    return build_meta(resolve_config(model.config), type(model), model.dtype)


def _add(
    meanings: dict[tuple[str, int | None], Meaning], key: tuple[str, int | None], site: Site, turned: bool = False
) -> None:
    """Add the roles of a site to a live parameter, which may be several sites joined."""
    before = meanings[key].roles if key in meanings else ()
    stored = site.layout.endswith("in_out")
    meanings[key] = Meaning(tuple(dict.fromkeys((*before, *site.roles))), site.layer, stored != turned)


@dataclass(frozen=True)
class Candidates:
    """The layer of a name, and its rows; some layouts use one name for two things."""

    layer: int | None
    rows: tuple[DialectRow, ...]


def dialect_meanings(model: Any) -> Mapping[tuple[str, int | None], Meaning]:
    """The roles of a model's parameters; empty if no dialect knows most of them."""
    names = [clean(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    keys = [key for key in map(clean, model.state_dict()) if key not in names]
    best: dict[str, Candidates] = {}
    for read in _readers(_absent_sets(model)):
        found = {name: rows for name in (*names, *keys) if (rows := read(name)) is not None}
        if len(found) > len(best):
            best = found
    if 2 * len([name for name in names if name in best]) <= len(names):
        return {}
    stems = _stems(best)
    meanings = {name: _meaning([best[name]], stems) for name in names if name in best}
    for name in names:
        if name not in best and (beside := [best[key] for key in keys if key in best and _is_beside(key, name)]):
            meanings[name] = _meaning(beside, stems)
    return {(name, None): meaning for name, meaning in meanings.items() if meaning.roles}


def _readers(absent: tuple[frozenset[str], ...]) -> Iterator[Callable[[str], Candidates | None]]:
    """One function for each layout of each dialect."""
    for dialect in map(load_dialect, dialect_names()):
        for word in sorted({*dialect.architectures.values()}):
            rows = [row for row in dialect.rows if row.only in ("", word) and frozenset(row.needs) not in absent]
            yield _reader(dialect, rows)


def _reader(dialect: Dialect, rows: list[DialectRow]) -> Callable[[str], Candidates | None]:
    patterns = [(row_pattern(row.name), row) for row in rows]
    by_kind: dict[str, list[tuple[re.Pattern[str], DialectRow]]] = {}  # names that differ in numbers share rows

    def read(name: str) -> Candidates | None:
        bare = dialect.bare(name)
        kind = _NUMBER_PART.sub("{}", bare)
        if kind not in by_kind:
            by_kind[kind] = [pair for pair in patterns if pair[0].fullmatch(bare)]
        found = by_kind[kind]
        match = found[0][0].fullmatch(bare) if found else None
        if match is None:
            return None
        layer = match.groupdict().get("l")
        return Candidates(None if layer is None else int(layer), tuple({row.roles: row for _, row in found}.values()))

    return read


def _absent_sets(model: Any) -> tuple[frozenset[str], ...]:
    """Roles that layers of Megatron-Core cannot have: its gated and its plain MLP have the same names."""
    gated = getattr(getattr(model, "config", None), "gated_linear_unit", None)
    if gated is None:
        return ()
    return (frozenset(load_roles().together["plain" if gated else "gated"]),)


def _stems(best: Mapping[str, Candidates]) -> Counter[tuple[int | None, str]]:
    """How many matrices of a layer are surely of attention, of latent attention, of an MLP."""
    sure = [(each.layer, each.rows[0]) for each in best.values() if len(each.rows) == 1]
    return Counter((layer, role.partition(".")[0]) for layer, row in sure for role in _matrices(row))


def _meaning(candidates: list[Candidates], stems: Counter[tuple[int | None, str]]) -> Meaning:
    """The roles of one parameter: of a name with two meanings, that of which the layer has other matrices."""

    def others(layer: int | None, row: DialectRow) -> int:
        return sum(stems[layer, role.partition(".")[0]] for role in row.roles)

    layer = candidates[0].layer
    chosen = [max(each.rows, key=lambda row: others(layer, row)) for each in candidates]
    roles = dict.fromkeys(role for row in chosen for role in _matrices(row))
    return Meaning(tuple(roles), layer, layout_of(chosen[0].expr).endswith("in_out"))


def _matrices(row: DialectRow) -> list[str]:
    vocabulary = load_roles().roles
    return [role for role in row.roles if vocabulary[role].kind in MATRICES]


def _is_beside(key: str, name: str) -> bool:
    """Whether a key of the state lies beside a parameter: `wq.weight` beside `wqkv.weight`."""
    return key.rpartition(".")[2] == name.rpartition(".")[2] and _parent(key) == _parent(name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]
