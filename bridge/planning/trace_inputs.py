"""Run a model on fake tensors to find modules that share inputs.

The model is one of `transformers`. Names do not show that: attention and MLP may read the same norm, an encoder's last
norm feeds every layer of the decoder, and a view in between separates readers. So the model runs on two tokens without
values, and the tensor objects are compared.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from bridge.core.values import InputGroup
from bridge.sources.configs.diffusion import is_diffusion_model, nested
from bridge.sources.live_models.diffusion_inputs import example_inputs
from bridge.sources.live_models.flat_patches import example_patches, reads_patches
from bridge.sources.live_models.own_caches import own_caches
from bridge.tracker.tensors import tensors_in

NORMS = ("LayerNorm", "RMSNorm")  # parts of class names: ModelOpt multiplies pre-scales into the weights of these norms


TEXT = 64  # tokens that pooled and banded attention can cut


@dataclass(frozen=True)
class Reads:
    """Groups of matrices that share an input, and modules that never run since another one reads their weight.

    Names are live ones. A group has two or more matrices, in the order in which they run. `unreached`: modules that
    nothing runs or reads for the `inputs` of the example.
    """

    groups: tuple[InputGroup, ...]
    never_run: tuple[str, ...]
    unreached: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def input_reads(model: Any, mode: FakeTensorMode) -> Reads:
    """Run `model`, whose weights are fake tensors of `mode`; what the first example raises if all fail is raised."""
    first: Exception | None = None
    for make in _examples(model):
        try:
            return _reads_of(model, mode, make)
        except Exception as error:  # whatever the forward raises
            first = first or error
    assert first
    raise first


def unreached_by_chance(model: Any, mode: FakeTensorMode) -> Reads:
    """What `input_reads` returns, if each number that the forward reads off a tensor is zero: groups may lack readers.

    Longformer asks whether a token has global attention, which none has unless the data say so.
    """
    return _reads_of(model, mode, partial(_example, model), guess=True)


def _reads_of(model: Any, mode: FakeTensorMode, make: Callable[[], dict[str, Any]], guess: bool = False) -> Reads:
    known: dict[tuple[type, int], bool] = {}
    with own_caches(), mode, torch.no_grad(), _Watch(model, guess) as watch:
        example = make()
        out = model(**example)
    watch.returned(out)
    groups = []
    for tensor, readers in watch.reads.values():
        if len(readers) < 2:
            continue
        norm = watch.norms.get(id(tensor), "")
        adds = bool(norm) and _adds_one(model.get_submodule(norm), known)
        groups.append(InputGroup(tuple(readers), norm, watch.alone(norm, list(readers)), adds))
    given = tuple(name for name in example if name != "use_cache")
    return Reads(tuple(dict.fromkeys(groups)), watch.never_run(), watch.unreached(), given)


class _Watch(TorchFunctionMode):
    """Records which linear modules read a tensor, which norm made it, and what else reads the output of a norm."""

    def __init__(self, model: Any, guess: bool = False) -> None:
        super().__init__()
        self._guess = guess
        # keeps each tensor, since an id is valid while it lives
        self.reads: dict[int, tuple[Any, dict[str, None]]] = {}
        self.norms: dict[int, str] = {}
        self.others: set[int] = set()
        self._made: dict[str, list[Any]] = {}
        self._weights: dict[int, list[str]] = {}  # of matrices and convolutions
        self._read: dict[str, None] = {}
        self._ran: set[str] = set()
        self._inside = 0
        self._model = model
        self._hooks = ExitStack()

    def __enter__(self) -> _Watch:
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                self._weights.setdefault(id(module.weight), []).append(name)
                self._hooks.enter_context(module.register_forward_pre_hook(partial(self._runs, name)))
            if isinstance(module, nn.Linear | Conv1D):
                self._hooks.enter_context(module.register_forward_pre_hook(partial(self._reads, name)))
                self._hooks.enter_context(module.register_forward_hook(self._leave))
            elif any(norm in type(module).__name__ for norm in NORMS):
                self._hooks.enter_context(module.register_forward_hook(partial(self._makes, name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if not self._guess:
                raise
            return False if args[0].dtype == torch.bool or func.__name__ == "__bool__" else 0
        if tensors_in(result):  # reading only a shape, dtype or device reads no values
            for tensor in tensors_in(args, kwargs or {}):
                self._read |= dict.fromkeys(self._weights.get(id(tensor), ()))
        if not self._inside:
            name = getattr(func, "__name__", "")
            in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
            results = {id(tensor) for tensor in tensors_in(result)}
            inputs = {id(tensor) for tensor in tensors_in(args, kwargs or {})} & self.norms.keys()
            # No tensor: the result is a shape or a dtype. The same tensor: a cast or a dropout that did nothing.
            self.others |= inputs if in_place else inputs - results if results else set()
        return result

    def returned(self, out: Any) -> None:
        """Count the model's own outputs as read; an encoder's states among them are not."""
        for key in ("last_hidden_state", "logits", "pooler_output"):
            self.others |= {id(tensor) for tensor in tensors_in(getattr(out, key, None))} & self.norms.keys()

    def alone(self, norm: str, readers: list[str]) -> bool:
        """True if only `readers` read the outputs of `norm`, and they read nothing else."""
        made = {id(tensor) for tensor in self._made.get(norm, ())}
        same = all(at in self.reads and list(self.reads[at][1]) == readers for at in made)
        only = all(at in made for at, (_, names) in self.reads.items() if names.keys() & set(readers))
        return bool(made) and same and only and not made & self.others

    def never_run(self) -> tuple[str, ...]:
        """Modules whose weight was read, but whose forward never ran, nor that of a module with the same weight."""
        known = {name: others for others in self._weights.values() for name in others}
        return tuple(name for name in self._read if not self._ran & set(known[name]))

    def unreached(self) -> tuple[str, ...]:
        """Modules whose weight was not read, and whose forward never ran, nor that of a module with the same weight."""
        idle = [names for names in self._weights.values() if not (self._ran | self._read.keys()) & set(names)]
        return tuple(name for names in idle for name in names)

    def _runs(self, name: str, *_: Any) -> None:
        self._ran.add(name)

    def _reads(self, name: str, _: Any, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor):
            self.reads.setdefault(id(args[0]), (args[0], {}))[1][name] = None
        self._inside += 1

    def _leave(self, *_: Any) -> None:
        self._inside -= 1

    def _makes(self, name: str, _: Any, __: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.norms[id(out)] = name
            self._made.setdefault(name, []).append(out)


def _adds_one(norm: Any, known: dict[tuple[type, int], bool]) -> bool:
    """Whether a norm multiplies by 1 + weight: its output is then not zero for a weight of zero.

    `known`: the answers by class and width.
    """
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    key = type(norm), weight.shape[-1]
    if key not in known:
        empty = copy.copy(norm)
        empty._parameters = {
            name: None if p is None else nn.Parameter(torch.zeros(p.shape), requires_grad=False)
            for name, p in norm._parameters.items()
        }
        with torch.no_grad():
            known[key] = bool(empty(torch.arange(1.0, weight.shape[-1] + 1)[None, None]).any())
    return known[key]


def _examples(model: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """The makers of examples: ModelOpt's own first, then longer texts, then a text with an image or a sound."""
    if is_diffusion_model(model):
        yield lambda: nested(example_inputs(model))
        return
    yield partial(_example, model)
    if model.main_input_name == "input_ids":
        yield partial(_example, model, tokens=TEXT)
        if "pixel_values" in inspect.signature(model.forward).parameters:
            yield lambda: _example(model) | _image(model)
        if hasattr(getattr(model.config, "audio_config", None), "spec_size"):
            yield lambda: _example(model) | _spectrogram(model)


def _example(model: Any, tokens: int = 2) -> dict[str, Any]:
    """Two tokens, as in ModelOpt's exporter; for other models an image or sound of the config's size."""
    accepted = inspect.signature(model.forward).parameters
    kind, config = model.main_input_name, model.config
    if kind == "pixel_values":
        inputs = _image(model)
    elif kind == "input_features":
        inputs = {kind: torch.zeros(1, *_features(config), dtype=model.dtype)}
    elif kind == "input_values":
        spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "frequency_stride")
        shape = (config.max_length, config.num_mel_bins) if spectrogram else (16000,)
        inputs = {kind: torch.zeros(1, *shape, dtype=model.dtype)}
    else:
        inputs = {kind: torch.ones(1, tokens, dtype=torch.long)}
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:  # T5EncoderModel has this flag too
        inputs["decoder_input_ids"] = torch.ones(1, 2, dtype=torch.long)
    return inputs | ({"use_cache": False} if "use_cache" in accepted else {})


def _image(model: Any) -> dict[str, Any]:
    if reads_patches(model):
        return example_patches(model, 1, 4, model.dtype)
    parts = (getattr(model.config, name, None) for name in ("vision_config", "backbone_config", "encoder"))
    vision = next((part for part in parts if hasattr(part, "image_size")), model.config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(1, getattr(vision, "num_channels", 3), height, width, dtype=model.dtype)}


def _spectrogram(model: Any) -> dict[str, Any]:
    """A sound of CLAP: its tower folds long spectrograms into squares."""
    audio = model.config.audio_config
    frames = audio.spec_size * (audio.spec_size // audio.num_mel_bins)
    return {"input_features": torch.zeros(1, 1, frames, audio.num_mel_bins, dtype=model.dtype)}


def _features(config: Any) -> tuple[int, int]:
    """The extents of a sound's features: bands and frames for Whisper and its kin, frames and bands for others."""
    frames = 2 * getattr(config, "max_source_positions", 1500)
    if hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, frames
    encoder = getattr(config, "encoder_config", config)
    bands = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
    return 64, next(int(getattr(encoder, name)) for name in bands if hasattr(encoder, name))
