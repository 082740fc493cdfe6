"""The parts of a live model's tensors that this process holds.

A part is memory of the model: writing into it changes the model. Nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.core.errors import UsageError, first_line
from bridge.core.text import named
from bridge.sources.memory.megatron_parts import Part
from bridge.sources.memory.unwrapped import is_distributed, unwrapped

META = (
    "on the meta device, without memory to fill: call model.to_empty(device=...) first, and after that what computes "
    "the buffers that no checkpoint has, such as rotary_emb.inv_freq"
)


def modules_of(model: Any) -> list[Any]:
    """The modules of a model, or of the list of a pipeline stage's chunks."""
    from torch import nn

    given = [*model] if isinstance(model, Sequence | nn.ModuleList) and not isinstance(model, str) else [model]
    if not given or not all(isinstance(module, nn.Module) for module in given):
        kinds = ", ".join(sorted({type(module).__name__ for module in given})) or "an empty list"
        raise UsageError(f"load fills a torch module, or a list of one stage's chunks; model is {kinds}")
    return given


def plain(module: Any) -> Any:
    """The module without DistributedDataParallel and other wrappers, over the same tensors; DTensors stay."""
    inner = module._modules.get("module") if type(module).__name__ == "DistributedDataParallel" else None
    return unwrapped(inner or module, parts=True)


def check_memory(modules: Sequence[Any]) -> None:
    """UsageError for tensors without memory or with shared values, and for FSDP1, which flattens its parameters."""
    tensors = [pair for module in modules for pair in (*module.named_parameters(), *module.named_buffers())]
    if meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise UsageError(f"{named(meta)}: {META}")
    if any(type(tensor).__name__ == "FlatParameter" for _, tensor in tensors):
        raise UsageError("the model is wrapped in FSDP1, whose parameters are flattened; use fully_shard (FSDP2)")
    if shared := [name for module in modules for name, tensor in _saved(module) if _overlaps(tensor)]:
        raise UsageError(f"{named(shared)}: several of its values are one place in memory (expand); give it a .clone()")


def _overlaps(tensor: Any) -> bool:
    """Whether two values of a tensor may lie at one place."""
    local = tensor.detach().to_local() if is_distributed(tensor) else tensor
    reach = 0  # of the axes with smaller strides
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)) if local.numel() else ():
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_sharded(modules: Sequence[Any]) -> bool:
    """Whether other processes hold parts of the model."""
    return any(is_distributed(tensor) for module in modules for tensor in _tensors(module))


@dataclass(frozen=True)
class Run:
    """Rows `begin` to `end` of a tensor of a checkpoint, which a module joins with others into a parameter."""

    name: str
    begin: int
    end: int


def module_parts(modules: Sequence[Any]) -> tuple[dict[str, Part], dict[str, str]]:
    """The parts by the names of `state_dict`, and further names of a tensor -> its first name.

    A buffer that is not saved is no part.
    """
    parts: dict[str, Part] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for module in modules:
        for name, tensor in _saved(module):
            if (other := first.setdefault(id(tensor), name)) != name:
                aliases[name] = other
            else:
                parts[name] = _part(name, tensor)
    return parts, aliases


def joined_rows(modules: Sequence[Any]) -> dict[str, tuple[Run, ...]]:
    """Parameters that their module saves as tensors of other names, by a hook on `state_dict` -> their rows.

    The hook runs on the numbers of the rows, not on weights; torchtitan's fused QKV has one.
    """
    found: dict[str, tuple[Run, ...]] = {}
    for module in modules:
        for prefix, inner in module.named_modules():
            if inner._state_dict_hooks:
                found |= _of_hook(inner, f"{prefix}." if prefix else "")
    return found


def _of_hook(module: Any, prefix: str) -> dict[str, tuple[Run, ...]]:
    import torch

    names, starts, state = [], [0], {}
    for key, tensor in module.named_parameters():
        rows = tensor.shape[0] if tensor.ndim else 1
        numbers = torch.arange(starts[-1], starts[-1] + rows)
        state[prefix + key] = numbers.reshape(-1, *[1] * (tensor.ndim - 1))
        names.append(prefix + key)
        starts.append(starts[-1] + rows)
    try:
        for hook in module._state_dict_hooks.values():
            state = hook(module, state, prefix, {}) or state
    except Exception as error:
        raise UsageError(f"{prefix}*: its hook on state_dict needs weights ({first_line(error)})") from error
    owners: list[Any] = [None] * starts[-1]
    for key, numbers in state.items():
        for row, number in enumerate(numbers.reshape(-1).tolist()):
            owners[number] = (key, row)
    found = {}
    for name, (begin, end) in zip(names, itertools.pairwise(starts), strict=True):
        if (runs := _runs(owners[begin:end], name)) != (Run(name, 0, end - begin),):
            found[name] = runs
    return found


def _runs(owners: Sequence[Any], name: str) -> tuple[Run, ...]:
    """Rows that follow each other in one tensor together."""
    runs: list[Run] = []
    for owner in owners:
        if owner is None:
            raise UsageError(f"{name}: a hook on state_dict leaves rows of it out")
        key, row = owner
        if runs and (runs[-1].name, runs[-1].end) == (key, row):
            runs[-1] = replace(runs[-1], end=row + 1)
        else:
            runs.append(Run(key, row, row + 1))
    return tuple(runs)


def _saved(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and saved buffers, with all names of those that are shared; no hook runs."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        own = {**inner._parameters, **inner._buffers}
        for key, tensor in own.items():
            if tensor is not None and key not in inner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, tensor


def _part(name: str, tensor: Any) -> Part:
    if not is_distributed(tensor):
        return Part(name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(f"{name}: each process holds a summand of it (Partial), which cannot be filled")
    local = tensor.detach().to_local()
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise UsageError(f"{name}: {tensor.placements} are not one block of {tuple(tensor.shape)}")
    return Part(name, local, tuple(tensor.shape), tuple(offsets))


def _tensors(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()
