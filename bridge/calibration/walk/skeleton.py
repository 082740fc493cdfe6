"""A model whose blocks are stand-ins that pause.

The model has no weights; ModelOpt is given the parts of it that hold one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.forwards import STANDS_FOR, pausing

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


class Skeleton:
    """The modules of a model. `model` runs with stand-ins for its blocks; `modules` are the blocks themselves.

    `rest`: the modules outside the blocks, by name.
    """

    def __init__(self, model: Any, blocks: Sequence[Block], device: Any) -> None:
        self.model = model
        self.modules = {block.name: model.get_submodule(block.name) for block in blocks}
        stands = {id(self.modules[b.name]): _stand_in(self.modules[b.name], b, device) for b in blocks}
        inside = {id(m) for module in self.modules.values() for m in module.modules()}
        self.rest = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
        for _, parent in self.rest:
            for key, child in parent._modules.items():
                if id(child) in stands:
                    parent._modules[key] = stands[id(child)]

    def inside(self, block: Block) -> list[tuple[str, Any]]:
        """Return the modules of a block, by name."""
        own = self.modules[block.name].named_modules()
        return [(f"{block.name}.{path}" if path else block.name, module) for path, module in own]

    def size(self, block: Block) -> int:
        """Return how many parameters a block has."""
        modules = (module for _, module in self.inside(block))
        return sum(p.numel() for module in modules for p in module._parameters.values() if p is not None)

    def is_embedding(self, block: Block) -> bool:
        """Whether a block is a single module without quantizers, such as an embedding."""
        return not block.quantized and not any(self.modules[block.name].children())

    def part(self, block: Block) -> Any:
        """Return a copy of the block's ancestors with nothing else in them.

        So names, patterns and checks of classes are those of the whole model. The outermost has a class of another
        name: ModelOpt asks some classes for layer 0, which most parts lack.
        """
        path = block.name.split(".")
        parents = [self.model, *(self.model.get_submodule(".".join(path[:n])) for n in range(1, len(path)))]
        copies = [emptied(parent) for parent in parents]
        for parent, key, child in zip(copies, path, [*copies[1:], self.modules[block.name]], strict=True):
            parent._modules[key] = child
        kind = type(copies[0])
        copies[0].__class__ = type(f"PartOf{kind.__name__}", (kind,), {"__module__": kind.__module__})
        return copies[0]


def emptied(module: Any) -> Any:
    """Return a copy without parameters, buffers, children and hooks."""
    new: Any = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__ |= {"_parameters": {}, "_buffers": {}, "_modules": {}} | {name: OrderedDict() for name in _HOOKS}
    return new


def _stand_in(module: Any, block: Block, device: Any) -> Any:
    """Return a module with the attributes of a block, which pauses the forward that calls it.

    Its own parameters have dtype, shape and device, and no memory: a model reads those of its embedding.
    """
    import torch

    new = emptied(module)
    new.__dict__["_modules"] = dict(module._modules)
    new.__dict__["_buffers"] = dict(module._buffers)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            empty = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            parameter = torch.nn.Parameter(empty, requires_grad=False)
            setattr(parameter, STANDS_FOR, f"{block.name}.{key}")
        new._parameters[key] = parameter
    new.__dict__["forward"] = pausing(block)
    return new
