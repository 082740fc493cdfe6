"""The plain model inside FSDP2, torch.compile and activation checkpointing.

Its modules are new objects that hold the caller's tensors: no value is copied, and the caller's modules stay as they
are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import MethodType
from typing import Any

from torch import nn

from bridge.core.errors import SourceError
from bridge.core.text import named

_INNER = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile's; activation checkpointing's

_STATE = "__composable_api_state_key"  # FSDP's, beside a module's own attributes


def unwrapped(model: Any, parts: bool = False) -> Any:
    """The module in `model`'s wrappers: itself if no part of it is wrapped, else plain modules over the same tensors.

    SourceError if a rank holds only a part of a tensor, unless `parts` are wanted: these stay DTensors.
    """
    model = _inner(model)
    tensors = [*model.parameters(), *model.buffers()]
    if not any(_inner(m) is not m or _plain_class(m) is not type(m) for m in model.modules()) and not any(
        is_distributed(tensor) for tensor in tensors
    ):
        return model
    for module in model.modules():
        if _plain_class(module) is not type(module):
            module.reshard()  # what the last forward gathered may be older than the optimizer's last step
    if not parts and (cut := cut_tensors(model)):
        raise SourceError(
            f"{_plain_class(model).__name__} in memory: this rank holds only a part of {named(cut)}\n"
            "  hint   gather it on every rank: get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)), of torch.distributed.checkpoint.state_dict; on rank 0 load that "
            "into a plain model, and give it; or save a distributed checkpoint and give its directory"
        )
    copies: dict[int, Any] = {}
    plain = _copy(model, copies, parts)
    for module in plain.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, MethodType) and id(value.__self__) in copies:
                module.__dict__[name] = MethodType(value.__func__, copies[id(value.__self__)])
    return plain


def cut_tensors(model: Any) -> list[str]:
    """The names of parameters and buffers of which this rank holds only a part."""
    every = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in every if is_distributed(tensor) and tensor.to_local().shape != tensor.shape]


def _copy(module: Any, copies: dict[int, Any], parts: bool) -> Any:
    """The module as its plain class; `copies` keeps what is shared shared."""
    module = _inner(module)
    if id(module) in copies:
        return copies[id(module)]
    cls = _plain_class(module)
    if not isinstance(module.__dict__.get("forward", module.forward), MethodType):
        raise SourceError(
            f"{cls.__name__} in memory: its forward was replaced by a function that runs the wrapped module; undo that "
            "(accelerate.hooks.remove_hook_from_submodules), or save the model and give its directory"
        )
    copies[id(module)] = plain = cls.__new__(cls)
    kept = {name: value for name, value in module.__dict__.items() if not name.startswith(_STATE)}
    plain.__dict__.update(kept, _compiled_call_impl=None)
    hooks = {name: value for name, value in kept.items() if name.startswith("_") and "_hooks" in name}
    of_fsdp = cls is not type(module)  # those gather and free
    plain.__dict__.update({n: OrderedDict(() if of_fsdp else v) for n, v in hooks.items() if isinstance(v, dict)})
    plain._parameters = {name: _tensor(tensor, copies, parts) for name, tensor in module._parameters.items()}
    plain._buffers = {name: _tensor(tensor, copies, parts) for name, tensor in module._buffers.items()}
    plain._modules = {
        name: child if child is None else _copy(child, copies, parts) for name, child in module._modules.items()
    }
    return plain


def _tensor(tensor: Any, copies: dict[int, Any], parts: bool) -> Any:
    if parts or not is_distributed(tensor):
        return tensor
    if id(tensor) not in copies:
        local = tensor.to_local().detach()
        copies[id(tensor)] = nn.Parameter(local, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local
    return copies[id(tensor)]


def _inner(module: Any) -> Any:
    """What stands inside wrappers that add nothing to a model's results."""
    for name in _INNER:
        if isinstance(inner := module._modules.get(name), nn.Module):
            return _inner(inner)
    return module


def _plain_class(module: Any) -> Any:
    """The class of a module; FSDP2 derives from it."""
    cls = type(module)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    while fsdp is not None and issubclass(cls, fsdp) and cls.__bases__[-1] is not fsdp:
        cls = cls.__bases__[-1]
    return cls


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)
