"""A process's parts of live GPTModels of Megatron-Core.

They are shares of tensors, layers and experts. The model itself says what they are, as it does when Megatron saves it
(`sharded_state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.core.dtypes import dtype_word
from bridge.core.errors import UsageError
from bridge.sources.live_models.megatron import gpt_model


@dataclass(frozen=True)
class Part:
    """This process's part of one tensor. `shape`: of the whole tensor; `offsets`: where the part begins in it.

    `is_copy`: another process has the same part, and that one counts.
    """

    name: str
    tensor: Any
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_copy: bool = False

    @property
    def dtype(self) -> str:
        return dtype_word(self.tensor.dtype)

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape


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
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    if shard.flattened_range is not None:
        raise UsageError(f"{shard.key}: this rank holds a range of its values, not rows and columns")
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    is_copy = not is_main_replica(shard.replica_id)
    return Part(shard.key, data, tuple(shard.global_shape), tuple(shard.global_offset), is_copy)


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
