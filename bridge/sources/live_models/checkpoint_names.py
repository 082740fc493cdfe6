"""Map checkpoint tensors to the tensors of a live `transformers` model.

transformers 5 renames and stacks while loading and undoes it in `save_pretrained`. Its own reverse conversion runs here
once over weightless tensors; offsets and strides of each result tell where it lies in them. No weight is touched, and
no storage address of a user's model is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from bridge.core.errors import SourceError
from bridge.core.text import natural
from bridge.core.values import TensorSpec
from bridge.sources.configs.diffusion import is_diffusion_model
from bridge.tables.model_types import names_with
from bridge.tracker.tensors import tensors_in

STACK = 3  # axes
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class LiveSlice:
    """A part of the tensor `live`: an index or a range per axis, then the order of the other axes; both () for all."""

    live: str
    index: tuple[int | tuple[int, int], ...] = ()
    order: tuple[int, ...] = ()

    @property
    def expert(self) -> int | None:
        """The expert's number in a stack, None outside a stack."""
        return self.index[0] if self.index and isinstance(self.index[0], int) else None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The range along the first axis that is cut, None if every axis is whole."""
        return next((part for part in self.index if isinstance(part, tuple)), None)

    def of(self, tensor: Any) -> Any:
        """Return this part of the torch tensor, NumPy array or the like that `live` names, as a view."""
        if not self.index:
            return tensor
        part = tensor[tuple(slice(*at) if isinstance(at, tuple) else at for at in self.index)]
        return part.permute(self.order) if hasattr(part, "permute") else part.transpose(self.order)


@dataclass(frozen=True)
class Origin:
    """The origin of a checkpoint tensor: parts of live tensors joined along `axis`.

    `computed`: more happens than cutting and joining; `parts` then only name the live tensors that it is made from.
    """

    spec: TensorSpec
    parts: tuple[LiveSlice, ...]
    axis: int = 0
    computed: bool = False

    @property
    def ref(self) -> LiveSlice | None:
        """The one live part that this tensor is, None if it is joined or computed."""
        return self.parts[0] if len(self.parts) == 1 and not self.computed else None


def live_names(model: Any, have: Iterable[str] | Mapping[str, TensorSpec] | None = None) -> dict[str, Origin]:
    """Map every checkpoint tensor of `model` (its weights may be on the meta device) to its origin in the model.

    The names are those that `save_pretrained` writes. `have`: the tensors of a checkpoint on disk. Names that differ
    (another prefix, legacy names) are matched as `from_pretrained` does, and experts as modules of each
    (`experts.3.gate_proj`) with the model's stacks; names unknown to the model are left out.

    >>> live_names(mixtral)["model.layers.0.block_sparse_moe.experts.3.w1.weight"].ref  # doctest: +SKIP
    LiveSlice(live='model.layers.0.mlp.experts.gate_up_proj', index=(3, (0, 80), (0, 60)), order=(0, 1))
    """
    state = model.state_dict()
    saved = reverse(model, without_ties(model, state))
    if have is None:
        return saved
    names = list(have)
    origins = {name: saved[name] for name in names if name in saved}
    unknown = [name for name in names if name not in saved]
    if unknown:
        absent = {name: origin for name, origin in saved.items() if name not in origins}
        origins.update(_as_loaded(model, state, unknown, absent))
    specs = have if isinstance(have, Mapping) else {}
    return {name: _as_stored(origins[name], specs.get(name)) for name in names if name in origins}


def live_modules(origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """Map live module names to checkpoint module names: a stack of experts to its experts' projections.

    Modules without weights of their own (an attention block) are found through their submodules.
    """
    modules: dict[str, dict[str, None]] = {}
    for name, origin in origins.items():
        for part in origin.parts:
            live, ours = part.live.rpartition(".")[0], name.rpartition(".")[0]
            modules.setdefault(live, {})[ours] = None
            while live and ours and live.rpartition(".")[2] == ours.rpartition(".")[2]:
                live, ours = live.rpartition(".")[0], ours.rpartition(".")[0]
                modules.setdefault(live, {})[ours] = None
    return {live: tuple(sorted(names, key=natural)) for live, names in modules.items()}


def live_parts(origins: Mapping[str, Origin]) -> dict[str, dict[LiveSlice, str]]:
    """Invert `live_names`: live tensor -> its parts -> the checkpoint tensor of each."""
    tensors: dict[str, dict[LiveSlice, str]] = {}
    for name, origin in origins.items():
        for part in origin.parts:
            tensors.setdefault(part.live, {})[part] = name
    return tensors


def tied_names(model: Any) -> dict[str, str]:
    """Return alias -> canonical of live tensors that the model declares tied and that are one parameter.

    A pair that shares memory but is not declared is two tensors, and so is a declared pair that was separated.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    params.update(model.named_buffers(remove_duplicate=False))
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {a: b for a, b in declared.items() if a in params and b in params and params[a] is params[b]}


def without_ties(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict that are saved: no aliases, nothing that the model itself ignores."""
    ignored = {*tied_names(model), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    return {name: value for name, value in state.items() if name not in ignored and isinstance(value, torch.Tensor)}


def reverse(model: Any, state: Mapping[str, Any]) -> dict[str, Origin]:
    """Run transformers' reverse conversion on weightless tensors and derive each result's place from its strides."""
    shadows = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    probe = Probe(shadows)
    try:
        with torch.no_grad(), probe:
            # diffusers saves a model's tensors as they are
            results = dict(shadows) if is_diffusion_model(model) else revert_weight_conversion(model, dict(shadows))
    except Exception as error:
        raise SourceError(f"{type(model).__name__}: its weights have no names of a checkpoint: {error}") from error
    return {name: probe.origin(name, results[name]) for name in sorted(results, key=natural)}


def computed(model: Any, origin: Origin, state: Mapping[str, Any]) -> Any:
    """Return the torch tensor of a `computed` origin: transformers' own conversion of only the parts it needs."""
    with torch.no_grad():
        return revert_weight_conversion(model, {part.live: state[part.live] for part in origin.parts})[origin.spec.name]


def _as_loaded(
    model: Any, state: Mapping[str, Any], unknown: list[str], absent: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Match names that `save_pretrained` would not write by the names that `from_pretrained` turns them into."""
    if is_diffusion_model(model):
        return {}
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def place(name: str) -> tuple[str, str | None, tuple[str, ...]]:
        live, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(state))
        return live, pattern, tuple(re.findall(r"\d+", name)) if pattern is not None else ()

    by_place = {place(name): origin for name, origin in absent.items()}
    origins = {}
    for name in unknown:
        if match := _EXPERT.fullmatch(name):
            block, expert, projection = match.groups()
            stack = "down_proj" if projection == "down_proj" else "gate_up_proj"
            if part := _of_expert(model, place(f"{block}.{stack}")[0], int(expert), projection):
                origins[name] = Origin(_spec(name, part.of(state[part.live])), (part,))
                continue
        live, converted, numbers = place(name)
        origin = by_place.get((live, converted, numbers))
        if origin is not None:
            origins[name] = replace(origin, spec=replace(origin.spec, name=name))
        elif converted is None and live in state:
            origins[name] = Origin(_spec(name, state[live]), (LiveSlice(live),))
    return origins


def _of_expert(model: Any, live: str, expert: int, projection: str) -> LiveSlice | None:
    """A projection of an expert in a live stack; None if the model has no such one, or joins gate and up otherwise."""
    module, _, key = live.rpartition(".")
    try:
        experts = model.get_submodule(module)
        shape = tuple(experts._parameters[key].shape)
    except (AttributeError, KeyError):
        return None
    if not getattr(experts, "is_concatenated", True) or expert >= shape[0]:
        return None
    turned = is_turned(experts)
    out, in_ = (shape[2], shape[1]) if turned else (shape[1], shape[2])
    half = out // 2
    rows = {"gate_proj": (0, half), "up_proj": (half, out)}.get(projection, (0, out))
    index = (expert, (0, in_), rows) if turned else (expert, rows, (0, in_))
    return LiveSlice(live, index, (1, 0) if turned else (0, 1))


def is_turned(experts: Any) -> bool:
    """Whether a module of experts has its matrices as [in, out]."""
    return bool(getattr(experts, "is_transposed", type(experts).__name__ in names_with("transposed_experts")))


def _as_stored(origin: Origin, spec: TensorSpec | None) -> Origin:
    """The origin of a stack that is stored as [in, out] where the model has [out, in], as the hub's Qwen3-VL-MoE."""
    stored, shape = spec.shape if spec else (), origin.spec.shape
    whole = origin.ref is not None and not origin.ref.index and len(shape) == STACK
    if not whole or stored == shape or stored != (shape[0], *shape[:0:-1]):
        return origin
    assert origin.ref
    part = LiveSlice(origin.ref.live, tuple((0, extent) for extent in shape), (0, 2, 1))
    return replace(origin, spec=replace(origin.spec, shape=stored), parts=(part,))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the conversion while it runs; `origin` reads the records afterwards."""

    def __init__(self, shadows: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = list(shadows.values())  # a storage's address is valid only while it is alive
        self._names = {_address(tensor): name for name, tensor in shadows.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in shadows.items()}
        self._joined: dict[int, tuple[list[torch.Tensor], int]] = {}
        self._made_from: dict[int, tuple[str, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return args[0]
        if func is aten.cat.default and len(args[0]) == 1:
            return args[0][0]
        inputs = tensors_in(*args)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError:
            if func not in (aten._reshape_alias.default, aten._unsafe_view.default, aten.view.default):
                raise
            # `reshape` had cloned what is no view, and was given the tensor itself above
            result = args[0].clone(memory_format=torch.contiguous_format).view(args[1])
        known = {_address(t) for t in inputs}
        for tensor in tensors_in(result):
            if _address(tensor) not in known:
                self._alive.append(tensor)
                self._made_from[_address(tensor)] = tuple(dict.fromkeys(n for t in inputs for n in self._sources(t)))
                if func is aten.cat.default:
                    self._joined[_address(tensor)] = (list(args[0]), args[1] if len(args) > 1 else 0)
        return result

    def _sources(self, tensor: torch.Tensor) -> tuple[str, ...]:
        name = self._names.get(_address(tensor))
        return (name,) if name is not None else self._made_from.get(_address(tensor), ())

    def origin(self, name: str, result: torch.Tensor) -> Origin:
        """Return the origin of `result`, which the conversion calls `name`."""
        spec, ref = _spec(name, result), self._ref(result)
        if ref is not None:
            return Origin(spec, (ref,))
        parts, axis = self._joined.get(_address(result), ([], 0))
        refs = [self._ref(part) for part in parts]
        if parts and None not in refs and result.is_contiguous() and result.shape == torch.cat(parts, axis).shape:
            return Origin(spec, tuple(ref for ref in refs if ref is not None), axis % result.ndim)
        return Origin(spec, tuple(LiveSlice(source) for source in self._sources(result)), computed=True)

    def _ref(self, view: torch.Tensor) -> LiveSlice | None:
        """Express a strided view as an index per axis and an order; None if it is not such a view."""
        live = self._names.get(_address(view))
        if live is None:
            return None
        base = torch.empty(self._shapes[live], device="meta")
        if view.shape == base.shape and view.stride() == base.stride():
            return LiveSlice(live)
        offset, starts = int(view.storage_offset()), []
        for step in base.stride():
            start, offset = divmod(offset, step) if step else (0, offset)
            starts.append(start)
        axes: list[int] = []
        for extent, step in zip(view.shape, view.stride(), strict=True):
            free = [a for a in range(base.ndim) if a not in axes and starts[a] + extent <= base.shape[a]]
            axis = next((a for a in free if base.stride(a) == step), free[0] if free and extent == 1 else None)
            if axis is None:
                return None
            axes.append(axis)
        ranges = {axis: (starts[axis], starts[axis] + n) for axis, n in zip(axes, view.shape, strict=True)}
        index = tuple(ranges.get(axis, starts[axis]) for axis in range(base.ndim))
        ref = LiveSlice(live, index, tuple(sorted(axes).index(axis) for axis in axes))
        back = ref.of(base)
        same = back.shape == view.shape and back.storage_offset() == view.storage_offset()
        steps = zip(back.shape, back.stride(), view.stride(), strict=True)
        return ref if same and all(n == 1 or a == b for n, a, b in steps) else None


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
