"""Small inputs of the denoisers of diffusers, by class.

Inputs that a model takes in a dictionary have its name before theirs: `added_cond_kwargs.text_embeds`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from bridge.sources.configs.diffusion import FLOAT32

TOKENS, TEXT, STEP = 16, 7, 500.0  # 16 is 4 x 4 patches
_TIME_IDS = 6  # SDXL: sizes and offsets of the image

Inputs = dict[str, torch.Tensor]


def example_inputs(model: Any, rows: int = 1) -> Inputs:
    """Random inputs of a few tokens for `model`, in its dtype; ValueError for a class that is not known here."""
    for kind in type(model).__mro__:
        if kind.__name__ in _BY_CLASS:
            inputs = _BY_CLASS[kind.__name__](model.config, rows)
            floats = {name for name, tensor in inputs.items() if tensor.is_floating_point() and name not in FLOAT32}
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            accepted = inspect.signature(model.forward).parameters
            return {
                name: tensor.to(dtype) if name in floats else tensor
                for name, tensor in inputs.items()
                if name.partition(".")[0] in accepted
            }
    raise ValueError(f"the inputs of {type(model).__name__} are not known; known classes: {', '.join(_BY_CLASS)}")


def _image(config: Any, rows: int) -> torch.Tensor:
    size = min(getattr(config, "sample_size", None) or 32, 32)
    return _random(rows, config.in_channels, size, size)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def _step(rows: int) -> torch.Tensor:
    return torch.full((rows,), STEP)


def _dit(config: Any, rows: int) -> Inputs:
    labels = torch.arange(rows) % config.num_embeds_ada_norm
    step = torch.full((rows,), int(min(STEP, config.num_embeds_ada_norm - 1)))
    return {"hidden_states": _image(config, rows), "timestep": step, "class_labels": labels}


def _flux(config: Any, rows: int) -> Inputs:
    axes = len(config.axes_dims_rope)
    side = torch.arange(TOKENS, dtype=torch.float32)
    places = torch.stack([torch.zeros(TOKENS), side // 4, side % 4, *[side] * (axes - 3)], dim=1)
    return {
        "hidden_states": _random(rows, TOKENS, config.in_channels),
        "encoder_hidden_states": _random(rows, TEXT, config.joint_attention_dim),
        **(
            {"pooled_projections": _random(rows, config.pooled_projection_dim)}
            if "pooled_projection_dim" in config
            else {}
        ),
        "timestep": _step(rows) / 1000,
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, axes),
        **({"guidance": torch.full((rows,), 3.5)} if config.get("guidance_embeds") else {}),
    }


def _sd3(config: Any, rows: int) -> Inputs:
    return {
        "hidden_states": _image(config, rows),
        "encoder_hidden_states": _random(rows, TEXT, config.joint_attention_dim),
        "pooled_projections": _random(rows, config.pooled_projection_dim),
        "timestep": _step(rows),
    }


def _unet(config: Any, rows: int) -> Inputs:
    width = config.cross_attention_dim
    inputs = {
        "sample": _image(config, rows),
        "timestep": _step(rows),
        "encoder_hidden_states": _random(rows, TEXT, width if isinstance(width, int) else max(width)),
    }
    if config.get("addition_embed_type") == "text_time":
        text = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        inputs["added_cond_kwargs.text_embeds"] = _random(rows, text)
        inputs["added_cond_kwargs.time_ids"] = torch.full((rows, _TIME_IDS), 64.0)
    return inputs


def _pixart(config: Any, rows: int) -> Inputs:
    inputs = {
        "hidden_states": _image(config, rows),
        "encoder_hidden_states": _random(rows, TEXT, config.caption_channels),
        "timestep": _step(rows),
    }
    given = config.get("use_additional_conditions")
    if given if given is not None else config.sample_size == 128:
        inputs["added_cond_kwargs.resolution"] = torch.full((rows, 2), 1024.0)
        inputs["added_cond_kwargs.aspect_ratio"] = torch.ones(rows, 1)
    return inputs


def _wan(config: Any, rows: int) -> Inputs:
    inputs = {
        "hidden_states": _random(rows, config.in_channels, 3, 8, 8),
        "encoder_hidden_states": _random(rows, TEXT, config.text_dim),
        "timestep": _step(rows),
    }
    if config.get("image_dim"):
        inputs["encoder_hidden_states_image"] = _random(rows, TEXT, config.image_dim)
    return inputs


_BY_CLASS: dict[str, Callable[[Any, int], Inputs]] = {
    "DiTTransformer2DModel": _dit,
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "UNet2DConditionModel": _unet,
    "WanTransformer3DModel": _wan,
}
