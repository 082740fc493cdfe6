"""Prune a Megatron-Core model in memory, in place.

The model goes through a checkpoint of its own in a temporary directory, so that the tables of Megatron's checkpoints
say what every tensor is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.api.verbs import convert
from bridge.core.errors import PlanError
from bridge.core.output.temporary import temporary_directory
from bridge.sources.pruned.source import PrunedSource

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
FIELDS = {  # of TransformerConfig -> of the pruned model's config.json; the first that is there
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads", "num_attention_heads"),
    "kv_channels": ("head_dim",),
    "num_layers": ("num_hidden_layers",),
}
CONSTRUCTED = (  # arguments of GPTModel that it keeps under the same name
    "transformer_layer_spec", "vocab_size", "max_sequence_length", "pre_process", "post_process", "parallel_output",
    "fp16_lm_cross_entropy", "share_embeddings_and_output_weights", "position_embedding_type", "rotary_percent",
    "rotary_base",
)  # fmt: skip


def prune_in_place(model: Any, cut: Callable[[Path], PrunedSource]) -> Any:
    """Replace what a GPTModel holds by the pruned model, and return it: whoever holds the object sees the smaller one.

    cut: makes the pruned source of a checkpoint.

    Raises:
        PlanError: the model is a part of a parallel one, or its config cannot be told in a checkpoint.
    """
    if split := [name for name in PARALLEL if getattr(model.config, name, 1) > 1]:
        raise PlanError(
            f"{type(model).__name__} in memory is one part of a model ({split[0]} above 1); prune its checkpoint"
        )
    from megatron.core import dist_checkpointing

    with temporary_directory() as folder:
        for name in ("whole", "pruned"):
            (folder / name).mkdir()
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder / "whole"))
        (folder / "whole/run_config.yaml").write_text(_run_config(model), encoding="utf-8")
        smaller = cut(folder / "whole")
        out = folder / "pruned/megatron"
        # Transformer Engine's linears have the norm before them
        spec = "te" if any("layer_norm_weight" in name for name, _ in model.named_parameters()) else "local"
        convert(smaller, "megatron", out=out, spec=spec, vocab_multiple=1, verify=False, progress=False)
        new = _rebuilt(model, smaller.config)
        loaded = dist_checkpointing.load(
            {"model": new.sharded_state_dict()}, str(out), strict="assume_ok_unexpected"
        )["model"]  # fmt: skip
        new.load_state_dict(loaded)
    new.train(model.training)
    model.__dict__ = new.__dict__
    return model


def _run_config(model: Any) -> str:
    """Megatron-Bridge's run_config.yaml of a live model."""
    import yaml

    plain = {name: value for name, value in vars(model.config).items() if isinstance(value, int | float | str | bool)}
    told = {name: getattr(model, name) for name in CONSTRUCTED[1:] if isinstance(getattr(model, name, None), int | str)}
    section = plain | told | {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "seq_length": model.max_sequence_length,
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": False,
        "rotary_base": getattr(model, "rotary_base", 10000),
        "rotary_percent": getattr(model, "rotary_percent", 1.0),
        "activation_func": {"_target_": _activation(model.config.activation_func), "_call_": False},
    }  # fmt: skip
    return str(yaml.safe_dump({"model": section}))


def _activation(function: Any) -> str:
    """The path of an activation function; of torch's, as users write it."""
    from torch.nn import functional

    for name in ("silu", "gelu", "relu"):
        if function is getattr(functional, name):
            return f"torch.nn.functional.{name}"
    return f"{function.__module__}.{function.__qualname__}"


def _rebuilt(model: Any, config: Any) -> Any:
    """A new model of the same class and specs, in the pruned sizes."""
    sizes = copy.copy(model.config)
    for name, keys in FIELDS.items():
        setattr(sizes, name, next(config[key] for key in keys if config.get(key) is not None))
    given = {name: getattr(model, name) for name in CONSTRUCTED if hasattr(model, name)}
    new = type(model)(config=sizes, **given)
    new.model_type = getattr(model, "model_type", None)
    first = next(model.parameters())
    new = new.to(first.device, first.dtype)
    if hasattr(model, "rotary_pos_emb"):
        new.rotary_pos_emb = model.rotary_pos_emb  # its scaling is in no field
    return new
