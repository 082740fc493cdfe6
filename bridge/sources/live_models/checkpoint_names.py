"""Translates between a live `transformers` model and its checkpoint: names, stacked experts, split or joined matrices.

transformers 5 renames and stacks while loading and undoes it in `save_pretrained`. What it undoes is not written down
here a second time: its own reverse conversion runs once over weightless tensors, and where each result lies in them is
read off offsets and strides. Never touches a weight, never looks at storage addresses of a user's model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import SourceError
from bridge.sources.shards import natural
from bridge.values import TensorSpec


@dataclass(frozen=True)
class LiveRef:
    """A part of the live tensor `live`: per axis an index or a range, then the order of the axes that are left.

    Both are empty where it is the whole tensor.
    """

    live: str
    index: tuple[int | tuple[int, int], ...] = ()
    order: tuple[int, ...] = ()

    @property
    def expert(self) -> int | None:
        """Which expert of a stack, None where the tensor is not one of a stack."""
        return self.index[0] if self.index and isinstance(self.index[0], int) else None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The range along the first axis that is cut, None where every axis is whole."""
        return next((part for part in self.index if isinstance(part, tuple)), None)

    def of(self, tensor: Any) -> Any:
        """Return this part of the torch tensor, NumPy array or the like that `live` names, as a view."""
        if not self.index:
            return tensor
        part = tensor[tuple(slice(*at) if isinstance(at, tuple) else at for at in self.index)]
        return part.permute(self.order) if hasattr(part, "permute") else part.transpose(self.order)


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint tensor comes from: parts of live tensors joined along `axis`.

    `computed`: more happens than cutting and joining; then `parts` only name the live tensors that it is made from.
    """

    spec: TensorSpec
    parts: tuple[LiveRef, ...]
    axis: int = 0
    computed: bool = False

    @property
    def ref(self) -> LiveRef | None:
        """The one live part that this tensor is, None where it is joined or computed."""
        return self.parts[0] if len(self.parts) == 1 and not self.computed else None


def live_names(model: Any, have: Iterable[str] | None = None) -> dict[str, Origin]:
    """Map every checkpoint tensor of `model` (its weights may be on the meta device) to where it lies in the model.

    The names are those that `save_pretrained` writes. `have`: the names that a checkpoint on disk really has; where
    they differ (another prefix, legacy names), they are matched the way `from_pretrained` does, and names that the
    model does not know are left out.

    >>> live_names(mixtral)["model.layers.0.block_sparse_moe.experts.3.w1.weight"].ref  # doctest: +SKIP
    LiveRef(live='model.layers.0.mlp.experts.gate_up_proj', index=(3, (0, 80), (0, 60)), order=(0, 1))
    """
    state = model.state_dict()
    saved = reverse(model, without_ties(model, state))
    if have is None:
        return saved
    wanted = list(have)
    found = {name: saved[name] for name in wanted if name in saved}
    unknown = [name for name in wanted if name not in saved]
    if unknown:
        absent = {name: origin for name, origin in saved.items() if name not in found}
        found.update(_as_loaded(model, state, unknown, absent))
    return {name: found[name] for name in wanted if name in found}


def live_modules(origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """Map live module names to checkpoint module names: a stack of experts to its experts' projections.

    Modules without weights of their own (an attention block) are found through what they contain.
    """
    found: dict[str, dict[str, None]] = {}
    for name, origin in origins.items():
        for part in origin.parts:
            live, ours = part.live.rpartition(".")[0], name.rpartition(".")[0]
            found.setdefault(live, {})[ours] = None
            while live and ours and live.rpartition(".")[2] == ours.rpartition(".")[2]:
                live, ours = live.rpartition(".")[0], ours.rpartition(".")[0]
                found.setdefault(live, {})[ours] = None
    return {live: tuple(sorted(names, key=natural)) for live, names in found.items()}


def live_parts(origins: Mapping[str, Origin]) -> dict[str, dict[LiveRef, str]]:
    """Turn `live_names` around: live tensor -> its parts -> the checkpoint tensor that holds each."""
    found: dict[str, dict[LiveRef, str]] = {}
    for name, origin in origins.items():
        for part in origin.parts:
            found.setdefault(part.live, {})[part] = name
    return found


def tied_names(model: Any) -> dict[str, str]:
    """Return alias -> canonical of the live tensors that the model declares tied and that are one parameter.

    A pair that shares memory without being declared is two tensors; a declared pair that was taken apart is, too.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    params.update(model.named_buffers(remove_duplicate=False))
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {a: b for a, b in declared.items() if a in params and b in params and params[a] is params[b]}


def without_ties(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict that are saved: no aliases, nothing that the model itself ignores."""
    import torch

    ignored = {*tied_names(model), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    return {name: value for name, value in state.items() if name not in ignored and isinstance(value, torch.Tensor)}


def reverse(model: Any, state: Mapping[str, Any]) -> dict[str, Origin]:
    """Run transformers' reverse conversion on weightless stand-ins and read each result's place off its strides."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from bridge.sources._probe import Probe

    shadows = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    probe = Probe(shadows)
    try:
        with torch.no_grad(), probe:
            results = revert_weight_conversion(model, dict(shadows))
    except Exception as error:
        raise SourceError(f"{type(model).__name__}: its weights cannot be named as in a checkpoint: {error}") from error
    return {name: probe.origin(name, results[name]) for name in sorted(results, key=natural)}


def computed(model: Any, origin: Origin, state: Mapping[str, Any]) -> Any:
    """Return the torch tensor of a `computed` origin: transformers' own conversion of just the parts it needs."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return revert_weight_conversion(model, {part.live: state[part.live] for part in origin.parts})[origin.spec.name]


def _as_loaded(
    model: Any, state: Mapping[str, Any], unknown: list[str], absent: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Match names of a checkpoint that `save_pretrained` would not write, by what `from_pretrained` makes of them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def place(name: str) -> tuple[str, str | None, tuple[str, ...]]:
        live, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(state))
        return live, pattern, tuple(re.findall(r"\d+", name)) if pattern is not None else ()

    by_place = {place(name): origin for name, origin in absent.items()}
    found = {}
    for name in unknown:
        where = place(name)
        origin = by_place.get(where)
        if origin is not None:
            spec = TensorSpec(name, origin.spec.shape, origin.spec.dtype)
            found[name] = Origin(spec, origin.parts, origin.axis, origin.computed)
        elif where[1] is None and where[0] in state:
            value = state[where[0]]
            spec = TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            found[name] = Origin(spec, (LiveRef(where[0]),))
    return found
