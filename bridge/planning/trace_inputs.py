"""Finds who reads one and the same tensor in a `transformers` model, by running it once on fake tensors; no weight.

Names do not tell it: attention and MLP may read one norm, an encoder's last norm feeds every layer of the decoder, a
view in between parts readers. So the model runs on two tokens that hold no values, and objects are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from bridge.values import InputGroup

NORMS = ("LayerNorm", "RMSNorm")  # what ModelOpt takes for a norm whose weight can hold a pre-scale: parts of its class


def input_groups(model: Any, mode: FakeTensorMode) -> tuple[InputGroup, ...]:
    """Run `model`, whose weights are fakes of `mode`, and return who shares an input, in live names.

    Groups of two or more matrices that multiply, in the order in which they run. Whatever the forward raises is raised.
    """
    plus_one = _PlusOne()
    with mode, torch.no_grad(), _Watch(model) as watch:
        out = model(**_example(model))
    watch.returned(out)
    groups = []
    for tensor, readers in watch.reads.values():
        if len(readers) < 2:
            continue
        norm = watch.norms.get(id(tensor), "")
        adds = bool(norm) and plus_one(model.get_submodule(norm))
        groups.append(InputGroup(tuple(readers), norm, watch.alone(norm, list(readers)), adds))
    return tuple(dict.fromkeys(groups))


class _Watch(TorchFunctionMode):
    """Notes which linear modules read which tensor, which norm made it, and what else reads what a norm made."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.reads: dict[
            int, tuple[Any, dict[str, None]]
        ] = {}  # holds each tensor: an id means something while it lives
        self.norms: dict[int, str] = {}
        self.others: set[int] = set()
        self._made: dict[str, list[Any]] = {}
        self._inside = 0
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                self._hooks.append(module.register_forward_pre_hook(self._reads(name)))
                self._hooks.append(module.register_forward_hook(self._leave))
            elif any(norm in type(module).__name__ for norm in NORMS):
                self._hooks.append(module.register_forward_hook(self._makes(name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            name = getattr(func, "__name__", "")
            in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
            made = {id(tensor) for tensor in _tensors(result)}
            given = {id(tensor) for tensor in _tensors((args, kwargs or {}))} & self.norms.keys()
            # No tensor: a shape or a dtype was asked for. The same tensor: a cast or a dropout that did nothing.
            self.others |= given if in_place else given - made if made else set()
        return result

    def returned(self, out: Any) -> None:
        """Take what the model returns as its own answer for read; an encoder's states beside it are not."""
        for key in ("last_hidden_state", "logits", "pooler_output"):
            self.others |= {id(tensor) for tensor in _tensors(getattr(out, key, None))} & self.norms.keys()

    def alone(self, norm: str, readers: list[str]) -> bool:
        """True when all that `norm` ever made was read by `readers` and nothing else, and they read nothing else."""
        made = {id(tensor) for tensor in self._made.get(norm, ())}
        same = all(at in self.reads and list(self.reads[at][1]) == readers for at in made)
        only = all(at in made for at, (_, found) in self.reads.items() if found.keys() & set(readers))
        return bool(made) and same and only and not made & self.others

    def _reads(self, name: str) -> Any:
        def hook(_: Any, args: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self.reads.setdefault(id(args[0]), (args[0], {}))[1][name] = None
            self._inside += 1

        return hook

    def _leave(self, *_: Any) -> None:
        self._inside -= 1

    def _makes(self, name: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                self.norms[id(out)] = name
                self._made.setdefault(name, []).append(out)

        return hook


class _PlusOne:
    """Tells norms that multiply by 1 + weight: with a weight of zero they still answer."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, int], bool] = {}

    def __call__(self, norm: Any) -> bool:
        weight = getattr(norm, "weight", None)
        if weight is None:
            return False
        key = type(norm), weight.shape[-1]
        if key not in self._known:
            self._known[key] = self._probe(norm)
        return self._known[key]

    def _probe(self, norm: Any) -> bool:
        empty = copy.copy(norm)
        empty._parameters = {
            key: None if p is None else nn.Parameter(torch.zeros(p.shape), requires_grad=False)
            for key, p in norm._parameters.items()
        }
        with torch.no_grad():
            return bool(empty(torch.arange(1.0, norm.weight.shape[-1] + 1)[None, None]).any())


def _example(model: Any) -> dict[str, Any]:
    """Return two tokens as ModelOpt's exporter gives them; an image or sound of the config's size for other models."""
    import inspect

    accepted = inspect.signature(model.forward).parameters
    kind, config = model.main_input_name, model.config
    if kind == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        given = {kind: torch.zeros(1, getattr(vision, "num_channels", 3), height, width)}
    elif kind == "input_features":
        given = {kind: torch.zeros(1, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 1500))}
    elif kind == "input_values":
        given = {kind: torch.zeros(1, 16000)}
    else:
        given = {kind: torch.ones(1, 2, dtype=torch.long)}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.ones(1, 2, dtype=torch.long)
    return given | ({"use_cache": False} if "use_cache" in accepted else {})


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
