"""Build `diffusers` models; never run code from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bridge.core.errors import SourceError
from bridge.core.text import named, nearest
from bridge.core.values import main_dtype
from bridge.core.version import install
from bridge.sources.configs.diffusion import without_architecture
from bridge.sources.live_models.loading import as_tensor

if TYPE_CHECKING:
    from bridge.sources.source import Source

INSTALL = install("diffusers")


def diffusion_class(config: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that the config names; SourceError without one."""
    name = str(config["_class_name"])
    try:
        with quiet():
            import diffusers
    except ImportError as error:
        raise SourceError(f"{name} is a model of diffusers, which cannot be imported ({error}); {INSTALL}") from error
    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)):
        models = [other for other in dir(diffusers) if "Transformer" in other or "UNet" in other]
        raise SourceError(
            f"class {name} is not a model of diffusers {diffusers.__version__}; {nearest(name, models)}; upgrade "
            "diffusers if the model is newer (code from a checkpoint is never run)"
        )
    return cls


def build_for(source: Source, device: str) -> Any:
    """Build the model of `source` in the dtype of its weights, without them."""
    return build(source.config, main_dtype(source.specs.values()), device, source.where)


def load_model(source: Source) -> Any:
    """Build the model with the weights of `source`, in their stored dtype and in eval mode."""
    model = build_for(source, "cpu")
    state = {name: as_tensor(source.read(name), spec.dtype) for name, spec in source.specs.items()}
    kept = _in_float32(model, state)
    state = {name: tensor.float() if name in kept else tensor for name, tensor in state.items()}
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    kind = type(model).__name__
    if missing or unknown:
        what = (
            f"needs {named(missing)}, which the checkpoint lacks" if missing else f"has no place for {named(unknown)}"
        )
        raise SourceError(f"{source.where}: {kind} {what}; is its config.json that of these weights?")
    return model.requires_grad_(False).eval()


def load_skeleton(source: Source) -> Any:
    """Build the same model with parameters on the meta device; buffers have their values."""
    model = build_for(source, "cpu")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in _in_float32(model, [name]):
            tensor.data = tensor.data.float()
    return model.eval()


def build(config: Mapping[str, Any], dtype: str, device: str, where: str) -> Any:
    """Build the class in `dtype`, with parameters on the meta device and buffers on `device`."""
    import torch
    from transformers.initialization import no_init_weights

    from bridge.sources.live_models.on_meta import parameters_on_meta

    cls = diffusion_class(config)
    try:
        with quiet(), no_init_weights(), torch.device(device), parameters_on_meta(getattr(torch, dtype)):
            return cls.from_config(without_architecture(config))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(f"{where}: diffusers cannot build {cls.__name__}: {lines[0][:300]}") from error


def _in_float32(model: Any, names: Any) -> set[str]:
    """The tensors of modules that diffusers keeps in float32 if the model is in 16 bits."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name for name in names if kept & set(name.split("."))}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what diffusers and transformers log while they are imported or build off the terminal."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
