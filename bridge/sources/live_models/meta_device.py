"""Build a transformers model of fake tensors from its config, without weights.

A stack of experts alone may be 30 GB. The model is built on the meta device, as transformers does itself: classes name
the CPU to read numbers off a tensor, such as the probability of dropping each layer.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bridge.core.dtypes import FLOATS
from bridge.core.errors import ExportError
from bridge.core.values import main_dtype
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.live_models import diffusion
from bridge.sources.live_models.flat_patches import resize_by_grid
from bridge.sources.live_models.loading import model_class, model_config
from bridge.sources.live_models.on_meta import parameters_on_meta
from bridge.sources.live_models.own_caches import own_caches

if TYPE_CHECKING:
    from bridge.sources.source import Source


def build_weightless(source: Source) -> tuple[Any, FakeTensorMode]:
    """Build the model that the source's config names, and return it with the mode of its tensors.

    In the dtype of the checkpoint, because a cast to the same dtype keeps an object and any other makes a new one.
    """
    dtype = getattr(torch, main_dtype(source.specs.values(), "bfloat16", FLOATS))
    if is_diffusion(source.config):
        make_fake(
            model := diffusion.build_for(source, "meta").eval(), mode := FakeTensorMode(allow_non_fake_inputs=True)
        )
        return model, mode
    with torch.device("meta"), no_init_weights():
        model = build_meta(resolve_config(dict(source.config)), model_class(source.config), dtype)
    model.tie_weights()
    resize_by_grid(model)
    make_fake(model, mode := FakeTensorMode(allow_non_fake_inputs=True))
    return model, mode


def load_skeleton(source: Source) -> Any:
    """Build the model that `load_model` builds, with parameters on the meta device; buffers have their values."""
    if is_diffusion(source.config):
        return diffusion.load_skeleton(source)
    dtype = getattr(torch, main_dtype(source.specs.values()))
    with no_init_weights():
        model = build_meta(model_config(source.config), model_class(source.config), dtype)
    if kept := model._get_dtype_plan(dtype):  # parts that transformers keeps in float32
        pattern, keys, _ = build_glob_alternation(list(kept))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if (match := pattern.search(name)) is not None:
                tensor.data = tensor.data.to(kept[keys[match.lastgroup]])
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()  # computes the other buffers again, in float32, as `from_pretrained` does
    model.tie_weights()
    return model.eval()


def copy_skeleton(model: Any) -> Any:
    """Copy the modules of a model in memory, with parameters on the meta device; buffers are copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    return copy.deepcopy(model, memo).eval()


def build_meta(config: Any, cls: Any, dtype: Any) -> Any:
    """Build `cls(config)` with parameters on the meta device and buffers computed on the CPU."""
    config._attn_implementation = None  # a live model's choice (flash attention) cannot be exported
    config.dtype = dtype
    with parameters_on_meta(dtype), own_caches():
        return cls(config).eval()


def settle_rope(model: Any) -> None:
    """Let long RoPE choose its frequencies inside the graph; transformers writes the choice into a buffer instead."""

    def forward(self: Any, x: Any, position_ids: Any) -> Any:
        trained = self.config.rope_parameters["original_max_position_embeddings"]
        is_long = torch.max(position_ids) + 1 > trained
        chosen = torch.where(is_long, self.long_inv_freq, self.original_inv_freq)
        settled = types.SimpleNamespace(inv_freq=chosen, attention_scaling=self.attention_scaling)
        return inspect.unwrap(type(self).forward)(settled, x, position_ids)

    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            raise ExportError(
                f"{name}: RoPE of type `dynamic` computes frequencies for each length, which a fixed graph cannot do\n"
                "  hint   set rope_parameters to `yarn`, `linear` or `longrope`, or convert with target `hf`"
            )
        if kind == "longrope":
            length = module.config.rope_parameters["original_max_position_embeddings"] + 1
            long_freq, _ = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length)
            module.register_buffer("long_inv_freq", long_freq, persistent=False)
            module.forward = types.MethodType(forward, module)


def settle_positions(model: Any) -> None:
    """Compute tables of positions that no checkpoint has, as transformers initializes them; resize others by data."""
    resize_by_grid(model)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, module in model.named_modules():
        if f"{name}.weight" in unsaved and hasattr(module, "create_weight"):
            table = module.create_weight()
            del module.weight
            module.register_buffer("weight", table, persistent=False)


def make_fake(model: Any, mode: Any) -> None:
    """Replace each weight by one fake CPU tensor of `mode`; tied weights stay tied."""
    fakes: dict[int, tuple[Any, Any]] = {}  # the original is kept alive: its id is the key
    with mode:
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in fakes:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fakes[id(parameter)] = (nn.Parameter(fake, requires_grad=False), parameter)
                module._parameters[key] = fakes[id(parameter)][0]
            for key, buffer in module._buffers.items():
                stored = key not in module._non_persistent_buffers_set
                if buffer is not None and (buffer.is_meta or (stored and buffer.is_floating_point())):
                    module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's log lines (torchvision is absent, no data to deduplicate) while it runs."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def resolve_config(config: Any) -> Any:
    """Return a private copy of a transformers config, or build it from the content of a config.json."""
    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config)
    kind = config.get("model_type")
    if kind is None:
        raise ExportError(
            "config has no `model_type`: transformers cannot tell the architecture; add it to config.json"
        )
    if kind not in CONFIG_MAPPING:
        raise ExportError(
            f"model_type {kind!r} is not in transformers {transformers.__version__}, which is installed here; "
            "upgrade transformers if the architecture is newer (code from the hub is never run)"
        )
    # JSON has no infinity: config.json has {"__float__": "Infinity"} instead.
    return CONFIG_MAPPING[kind].from_dict(PretrainedConfig._decode_special_floats(dict(config)))
