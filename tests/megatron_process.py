"""What one rank of megatron-core does on a CPU, for tests.megatron_oracle. Nothing of bridge is used."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.megatron_families import FAMILIES, VOCAB, Family

SEQUENCE = 72  # a wrong RoPE permutation shows after some twenty positions
UNFUSED = {  # megatron's fused kernels and its GPU initialization need a GPU
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}


class ZeroCentred(torch.nn.Module):
    """Transformer Engine's norms with zero_centered_gamma, which megatron's local norms refuse: times 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.normalization, self.eps, self.size = config.normalization, eps, (hidden_size,)
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.normalization == "LayerNorm":
            return torch.nn.functional.layer_norm(x, self.size, 1 + self.weight, self.bias, self.eps)
        return torch.nn.functional.rms_norm(x, self.size, 1 + self.weight, self.eps)


def start(rank: int, tp: int, pp: int, store: str) -> None:
    """Join the other ranks on gloo; calls to CUDA that megatron makes unasked get a stand-in."""
    warnings.simplefilter("ignore")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.Tensor.cuda = lambda self, *_: self
    torch.cuda.synchronize = lambda *_: None
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # asked for without being defined where Transformer Engine is absent
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # its forward stays out of reach
    parallel_state.initialize_model_parallel(tp, pp)


def functions() -> dict[str, Any]:
    """The activation functions of the families, as megatron's own configurations name them."""
    from megatron.core.activations import fast_gelu, squared_relu

    return {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "fast_gelu": fast_gelu,
        "squared_relu": squared_relu,
    }


def build(family: Family, spec: str = "te", grouped: bool = False) -> Any:
    """This rank's part of the model. `grouped` builds the experts as one module, whose forward needs a GPU."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = family.config | {"activation_func": functions()[family.activation], **UNFUSED}
    fields.update(moe_grouped_gemm=False, layernorm_zero_centered_gamma=False)
    tp, pp = ranks.get_tensor_model_parallel_world_size(), ranks.get_pipeline_model_parallel_world_size()
    fields.update(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32)
    if pp > 1:  # three layers: two and one
        fields.update(num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=1)
    config = TransformerConfig(**fields)
    experts = config.num_moe_experts
    layer = get_gpt_layer_local_spec(experts, grouped, config.qk_layernorm, normalization=config.normalization)
    if experts and spec == "te":  # Transformer Engine fuses the norm into dense layers only
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    block: Any = layer
    if family.zero_centred:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ZeroCentred
        block = TransformerBlockSubmodules([layer] * config.num_layers, ZeroCentred)
        assert pp == 1, "a block's layers are given one by one here"
    first, last = ranks.is_pipeline_first_stage(), ranks.is_pipeline_last_stage()
    model = GPTModel(config, block, pre_process=first, post_process=last, parallel_output=False, **family.model)
    if family.hf["model_type"] == "gemma" and first:  # as Megatron-Bridge's and NeMo's mixin do
        model.embedding.register_forward_hook(lambda _module, _args, out: out * family.config["hidden_size"] ** 0.5)
    return model.eval()


@torch.no_grad()
def fill(model: Any, seed: int) -> None:
    """Random weights; nothing stays at a constant that hides a mix-up, padded rows of the vocabulary included."""
    numbers = torch.Generator().manual_seed(seed)
    centred = any(isinstance(module, ZeroCentred) for module in model.modules())
    for name, tensor in sorted(model.named_parameters()):
        tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.15)
        tensor += 1.0 * ("layernorm.weight" in name and not centred)


def made(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Ids, logits of the real vocabulary, and the tensors of the module by its own (local) names."""
    model = _filled(name)
    ids = _ids()
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items() if "_extra_state" not in key}
    return ids.numpy(), answer(model, ids), state


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


def _filled(name: str, spec: str = "te") -> Any:
    model = build(FAMILIES[name], spec)
    fill(model, sum(map(ord, name)))
    return model


@torch.no_grad()
def answer(model: Any, ids: torch.Tensor) -> np.ndarray:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()  # True: not looked at
    return np.asarray(model(ids, positions, mask)[..., :VOCAB])


@torch.no_grad()
def save(name: str, out: str, source: str | None, options: dict[str, Any]) -> None:
    """Write a torch_dist directory by megatron's own save, with the weights of `source`, written by one rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    family = FAMILIES[name]
    if source is None:
        model = _filled(name, options["spec"])
    else:
        model = build(family, options["spec"], family.grouped)
        load(model, source)
    if options["plain_norms"]:
        for key, tensor in model.named_parameters():
            tensor += 1.0 * ("layernorm" in key)
    model.to(getattr(torch, options["dtype"]))
    sharded = _sharded(model, options["prefix"], options["layers"])
    if options["optimizer"]:
        apply_factories(sharded)
        parts = [part for part in nested_values(sharded) if isinstance(part, ShardedTensor)]
        moments = [dataclasses.replace(part, key=f"optimizer.state.exp_avg.{part.key}") for part in parts]
        sharded["optimizer"] = moments
    Path(out).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({"model": sharded, **options["common"]}, out)


def quantized(name: str, out: str, scheme: str) -> dict[str, np.ndarray]:
    """Quantize by ModelOpt on the family's own ids, write what training frameworks then write, and return the amax."""
    import modelopt.torch.quantization as mtq
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    ids = _ids()
    model = mtq.quantize(_filled(name), copy.deepcopy(getattr(mtq, scheme)), lambda model: answer(model, ids))
    Path(out).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({"model": _sharded(model, "", "stacked"), "iteration": 100}, out)
    save_sharded_modelopt_state([model], out)
    scales = ("_amax", "_pre_quant_scale")
    return {key: tensor.numpy() for key, tensor in model.state_dict().items() if key.endswith(scales)}


def _sharded(model: Any, prefix: str, layers: str) -> dict[str, Any]:
    metadata = {"non_homogeneous_layers": layers != "stacked", "singleton_local_shards": layers == "singleton"}
    return dict(model.sharded_state_dict(prefix=prefix, metadata=metadata))


def load(
    model: Any, directory: str, prefix: str = "", layers: str = "stacked", strict: str = "assume_ok_unexpected"
) -> None:
    """Load a torch_dist directory by megatron's own load; what the module has and the directory has not is an error."""
    from megatron.core import dist_checkpointing

    sharded = _sharded(model, prefix, layers)
    loaded = dist_checkpointing.load({"model": sharded}, directory, strict=strict)["model"]
    model.load_state_dict({key.removeprefix(prefix): value for key, value in loaded.items()}, strict=True)


def load_and_run(name: str, directory: str, ids: np.ndarray, prefix: str, layers: str, strict: str) -> np.ndarray:
    model = build(FAMILIES[name])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
    load(model, directory, prefix, layers, strict)
    return answer(model, torch.from_numpy(ids))


def part(name: str, source: str) -> tuple[int, int, dict[str, Any]]:
    """This rank's tensor and pipeline number, and its part of the module's state dict."""
    from megatron.core import parallel_state as ranks

    model = build(FAMILIES[name])
    load(model, source)
    state = {key: value.numpy() for key, value in model.state_dict().items() if "_extra_state" not in key}
    return ranks.get_tensor_model_parallel_rank(), ranks.get_pipeline_model_parallel_rank(), state
