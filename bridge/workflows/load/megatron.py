"""A rank's parts of live GPTModels of Megatron-Core.

They are shares of tensors, layers and experts. The model itself says what they are, as it does when Megatron saves it
(`sharded_state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from bridge.core.errors import UsageError
from bridge.sources.live_models.megatron import gpt_model
from bridge.sources.source import Source
from bridge.targets.megatron import SPECS
from bridge.workflows.load.parts import Part

if TYPE_CHECKING:
    from bridge.planning.plan import Plan

# Fields that decide how a model reads its tensors, although no shape shows them.
MEANING = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "gated_linear_unit",
    "layernorm_zero_centered_gamma", "normalization", "num_moe_experts", "moe_router_topk", "qk_layernorm",
    "multi_latent_attention",
)  # fmt: skip


def gpt_models(modules: Sequence[Any]) -> list[Any]:
    """The GPTModels inside the chunks of a pipeline stage; [] if they are of another kind."""
    found = [gpt_model(module) for module in modules]
    return found if all(model is not None for model in found) else []


def megatron_parts(models: Sequence[Any]) -> list[Part]:
    """This rank's parts; several have one name: experts, and rows of gate and up."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    parts: list[Part] = []
    for model in models:
        sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        apply_factories(sharded)
        shards = [shard for shard in nested_values(sharded) if isinstance(shard, ShardedTensor)]
        parts += [_part(shard) for shard in shards]
        _check_filled(model, [shard.data for shard in shards])
    return parts


def _part(shard: Any) -> Part:
    if shard.flattened_range is not None:
        raise UsageError(f"{shard.key}: this rank holds a range of its values, not rows and columns")
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    return Part(shard.key, data, tuple(shard.global_shape), tuple(shard.global_offset))


def _check_filled(model: Any, views: Sequence[Any]) -> None:
    """UsageError for parameters of which the parts are copies, as of some kernels' layouts, or not all."""
    held: dict[int, int] = {}
    for view in {(one.data_ptr(), tuple(one.shape)): one for one in views}.values():
        at = view.untyped_storage().data_ptr()
        held[at] = held.get(at, 0) + view.numel()
    for name, tensor in model.named_parameters():
        if tensor.numel() and held.get(tensor.untyped_storage().data_ptr(), 0) < tensor.numel():
            raise UsageError(
                f"{name}: Megatron lays it out otherwise in checkpoints than in memory (moe_grouped_gemm without "
                "Transformer Engine does); convert to target megatron, and load that with Megatron"
            )


def options_for(models: Sequence[Any]) -> list[dict[str, Any]]:
    """Options of target megatron that may give the model's names: its padded vocabulary, specs of layers, drafts."""
    first = models[0]
    drafts = {} if getattr(first.config, "mtp_num_layers", None) else {"drafts": "drop"}
    return [{"vocab_multiple": int(first.vocab_size), "spec": spec, **drafts} for spec in SPECS]


def unlike(model: Any, source: Source, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield fields of the model's configuration that a model of the checkpoint has otherwise."""
    from bridge.targets.dcp.megatron_layout import Layout

    layout = Layout(source.config, source.specs, plan.options["vocab_multiple"])
    section: Mapping[str, Any] = yaml.safe_load(layout.run_config(plan))["model"]
    own = vars(model.config) | {"rotary_base": getattr(model, "rotary_base", None)}
    for name in (*MEANING, "rotary_base"):
        ours, theirs = section.get(name), own.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"config.{name}", f"is {theirs} in the model, {ours} in the checkpoint"
    if own.get("rotary_interleaved"):
        yield "config.rotary_interleaved", "is on in the model; the checkpoint's heads are in halves"
