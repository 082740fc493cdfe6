"""What one of several processes does for tests.workflows.load.test_load_ranks: fill its part of a model by `load`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

import bridge
from tests.models.megatron_families import EVERY, PADDED, VOCAB
from tests.oracles import megatron_process


def start(rank: int, sizes: dict[str, int], store: str) -> None:
    """Join the other processes; `sizes`: of all, and of Megatron's tensor, pipeline and expert ranks."""
    world, tp, pp, ep = (sizes.get(name, 1) for name in ("world", "tp", "pp", "ep"))
    virtual = sizes.get("vp")
    megatron_process.start(rank, world, 1, store)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, virtual, expert_model_parallel_size=ep)
    megatron_process.UNFUSED["expert_model_parallel_size"] = ep


def emptied(model: Any) -> Any:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(7)
    return model


def megatron(name: str, directory: str) -> tuple[list[str], int, int]:
    """Load into a GPTModel, and into another by Megatron's own load; tensors that differ, bytes read, and of the model.

    Padding of the vocabulary is zero here, as in a conversion; of the saved model it is not.
    """
    from megatron.core import parallel_state as ranks

    ours, theirs = emptied(megatron_process.build(EVERY[name])), megatron_process.build(EVERY[name])
    loaded = bridge.load([ours], directory)
    megatron_process.load(theirs, directory)
    mine, wanted = ours.state_dict(), theirs.state_dict()
    first = ranks.get_tensor_model_parallel_rank() * (PADDED // ranks.get_tensor_model_parallel_world_size())
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if wanted.get(key) is not None:
            wanted[key] = wanted[key].clone()
            wanted[key][max(VOCAB - first, 0) :] = 0
    tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
    return [key for key, value in tensors.items() if not torch.equal(mine[key], value)], loaded.read, loaded.nbytes


def virtual(source: Any, directory: str) -> list[str]:
    """Fill the chunks of a virtual pipeline; tensors that Megatron's own load of a directory has otherwise."""
    from megatron.core import dist_checkpointing

    ours, theirs = _chunks(directory), _chunks(directory)
    bridge.load([emptied(chunk) for chunk in ours], source)
    sharded = {f"model{at}": megatron_process._sharded(chunk, "", "stacked") for at, chunk in enumerate(theirs)}
    loaded = dist_checkpointing.load(sharded, directory, strict="assume_ok_unexpected")
    differing = []
    for at, chunk in enumerate(ours):
        wanted = {key: value for key, value in loaded[f"model{at}"].items() if isinstance(value, torch.Tensor)}
        assert {"decoder.layers.0.mlp.linear_fc2.weight"} <= wanted.keys()
        differing += [key for key, value in chunk.named_parameters() if not torch.equal(wanted[key], value)]
    return differing


def _chunks(directory: str) -> list[Any]:
    """This rank's chunks of the model that run_config.yaml in a directory describes."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    family, count = megatron_process.written_family(directory), 2
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": count}
    fields = family.config | megatron_process.UNFUSED | sizes | {"pipeline_dtype": torch.float32}
    config = TransformerConfig(**fields | {"activation_func": torch.nn.functional.silu})
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    ends = [
        (
            ranks.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            ranks.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        )
        for stage in range(count)
    ]
    return [
        GPTModel(config, spec, pre_process=first, post_process=last, vp_stage=stage, **family.model)
        for stage, (first, last) in enumerate(ends)
    ]


def unlike(name: str, directory: str, changed: dict[str, Any]) -> str:
    """The refusal of a GPTModel whose configuration is not the checkpoint's."""
    model = megatron_process.build(dataclasses.replace(EVERY[name], config=EVERY[name].config | changed))
    return refusal(model, directory)


def refusal(model: Any, directory: str) -> str:
    """The error of a load, and whether the model kept its values."""
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    try:
        bridge.load(model, directory)
    except bridge.BridgeError as error:
        kept = all(torch.equal(_local(before[name]), _local(tensor)) for name, tensor in model.named_parameters())
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}, {'kept' if kept else 'changed'}"
    return ""


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded(name: str, mesh: dict[str, int]) -> Any:
    """A model of transformers, emptied: layers and heads cut by tensor-parallel ranks, then by `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.models.decoder_families import build

    model = emptied(build(name, torch.float32))
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    for layer in model.model.layers:
        if "tp" in mesh:
            cuts: dict[str, Any] = {f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"}
            cuts |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            parallelize_module(
                layer, axes["tp"], cuts | {f"mlp.{one}_proj": ColwiseParallel() for one in ("gate", "up")}
            )
        fully_shard(layer, mesh=axes["dp"])
    return fully_shard(model, mesh=axes["dp"])


def transformers(name: str, directory: str, mesh: dict[str, int]) -> tuple[list[str], int, int]:
    """Load into a sharded model; tensors that are not those of `from_pretrained`, bytes read, and of the part."""
    model = sharded(name, mesh)
    loaded = bridge.load(model, directory)
    wanted = type(model).__bases__[-1].from_pretrained(directory, dtype=torch.float32).state_dict()
    whole = {key: getattr(value, "full_tensor", lambda v=value: v)() for key, value in model.state_dict().items()}
    assert whole.keys() == wanted.keys()
    return [key for key, value in wanted.items() if not torch.equal(whole[key], value)], loaded.read, loaded.nbytes


def refused(name: str, directories: list[str]) -> str:
    """The error where this process loads the directory of its rank."""
    rank = torch.distributed.get_rank()
    return refusal(sharded(name, {"dp": torch.distributed.get_world_size()}), directories[rank])


def fails_on(name: str, directory: str, rank: int, how: str) -> str:
    """The error where one process fails: while it reads ("read"), or by never calling ("absent") or ending ("dies")."""
    from datetime import timedelta
    from unittest import mock

    from bridge.calibration.walk.workers import processes
    from bridge.workflows.load import fill

    model = sharded(name, {"dp": torch.distributed.get_world_size()})
    if torch.distributed.get_rank() == rank:
        if how == "absent":
            return ""
        if how == "dies":
            with mock.patch.object(fill, "fill", side_effect=lambda *_: os._exit(9)):
                bridge.load(model, directory)
        with mock.patch.object(fill.Rows, "piece", side_effect=OSError("the disk is gone")):
            return refusal(model, directory)
    with mock.patch.object(processes, "JOIN", timedelta(seconds=3)):
        return refusal(model, directory)


def titan(hf: dict[str, Any], config: dict[str, Any], name: str, era: str) -> dict[str, Any]:
    """The whole tensors of torchtitan's own sharded model that was filled from Hugging Face's."""
    from torch.distributed.fsdp import fully_shard

    from tests.oracles import torchtitan_process
    from tests.targets.dcp.test_torchtitan import of_hf

    model = emptied(torchtitan_process._build(era, name)[0])
    for layer in model.layers.values():
        fully_shard(layer)
    bridge.load(fully_shard(model), of_hf(hf, config))
    return {
        key: value.full_tensor().numpy() for key, value in model.state_dict().items() if hasattr(value, "full_tensor")
    }


def titan_refusals(hf: dict[str, Any], config: dict[str, Any], name: str, era: str, changes: list[Any]) -> list[str]:
    """The refusals of torchtitan's own model, for each change of the checkpoint's configuration."""
    from tests.oracles import torchtitan_process
    from tests.targets.dcp.test_torchtitan import of_hf

    model = emptied(torchtitan_process._build(era, name)[0])
    return [refusal(model, of_hf(hf, config | change)) for change in changes]
