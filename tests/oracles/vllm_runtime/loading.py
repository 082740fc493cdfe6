"""What of a checkpoint vLLM reads, what of its model nothing sets, and which codes it changes after loading.

vLLM's loaders skip some names without a word, so both directions are watched here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

PATTERNS = ((0x55, 1.0), (0xAA, float("nan")))  # bytes; of float32, values that vLLM's checks of scales let pass
STORES = ("copy_", "__setitem__", "set_", "item", "tolist", "cat", "stack")


class Watched(torch.Tensor):
    """A tensor of the checkpoint that tells when its values are stored somewhere; its views and casts tell too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sources = [item for item in _flat(args) if isinstance(item, Watched) and hasattr(item, "record")]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") in STORES:
            for source in sources:
                source.record[0].add(source.record[1])
        elif sources:
            for part in _flat([result]):  # `unbind` and `chunk` return several
                if isinstance(part, Watched):
                    part.record = sources[0].record
        return result


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


@dataclass
class Facts:
    """What was seen while one checkpoint was loaded."""

    names: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    unset: list[str] = field(default_factory=list)  # parameters of which the checkpoint set no element, or not all
    codes: dict[str, torch.Tensor] = field(default_factory=dict)  # FP8 weights before vLLM processes them

    def unread(self) -> list[str]:
        return sorted(self.names - self.read)

    def changed(self, model: Any) -> dict[str, int]:
        """FP8 weight -> how many of its codes are others than those of the file."""
        counts = {}
        for name, parameter in model.named_parameters():
            before = self.codes.get(name)
            if before is None or parameter.dtype != before.dtype:
                continue
            same = parameter.shape == before.shape and parameter.is_contiguous()
            after = (parameter.data if same else parameter.data.t()).contiguous()  # kernels want some as [in, out]
            counts[name] = int((after.view(torch.uint8) != before.view(torch.uint8)).sum())
        return counts


def watch(loader_class: Any) -> list[Facts]:
    """From now on vLLM's loader records what it does; the list's last entry belongs to the last load."""
    seen: list[Facts] = []

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        def weights() -> Iterable[tuple[str, torch.Tensor]]:
            self._init_ep_weight_filter(model_config)
            return self.get_all_weights(model_config, model)

        seen.append(Facts())
        load(model, weights, seen[-1])

    loader_class.load_weights = load_weights
    return seen


def load(model: Any, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], facts: Facts) -> None:
    """Load a model twice over two patterns: what a load leaves of them is what it does not set."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    loads = []
    for pattern in PATTERNS:
        for parameter in parameters.values():
            _fill(parameter.data, *pattern)
        model.load_weights(_watched(weights(), facts))
        loads.append({name: _bytes(parameter).clone() for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        missing = loads[0][name] != loads[1][name]
        if missing.any():
            facts.unset.append(name)
            _bytes(parameter).copy_(torch.where(missing, _bytes(before[name]), loads[1][name]))
        if parameter.dtype == torch.float8_e4m3fn and parameter.dim() > 1:
            facts.codes[name] = parameter.data.clone()


def _watched(weights: Iterable[tuple[str, torch.Tensor]], facts: Facts) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        facts.names.add(name)
        watched = tensor.as_subclass(Watched)
        watched.record = (facts.read, name)
        yield name, watched


def _fill(tensor: torch.Tensor, pattern: int, value: float) -> None:
    if tensor.dtype == torch.float32:
        tensor.fill_(value)
    else:
        _bytes(tensor).fill_(pattern)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.contiguous().view(-1).view(torch.uint8) if tensor.data.is_contiguous() else _refuse(tensor)


def _refuse(tensor: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"a parameter of shape {tuple(tensor.shape)} that is not contiguous before it is loaded")
