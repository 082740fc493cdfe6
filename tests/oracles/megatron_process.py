"""What one rank of megatron-core does on a CPU, for tests.oracles.megatron_oracle. Nothing of bridge is used."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import queue
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.models.megatron_families import EVERY, VOCAB, Family

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

NOT_WRITTEN = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "moe_token_dispatcher_type": "allgather"}
GPT = (  # arguments of GPTModel that Megatron-Bridge's providers hand on
    "position_embedding_type", "rotary_percent", "rotary_base", "rope_scaling", "rope_scaling_factor",
    "seq_len_interpolation_factor", "share_embeddings_and_output_weights",
)  # fmt: skip


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
    ones = torch.ones  # of which it makes the mask of a window
    torch.ones = lambda *size, device=None, **more: ones(*size, device=None if device == "cuda" else device, **more)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    # writers beside a training hand their results to a process, which imports torch first; here nothing runs beside
    filesystem_async._results_queue = queue.Queue()
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    multi_latent_attention.HAVE_TE = False  # it takes the empty names that stand for it for its classes
    moe_utils.te_general_gemm = None  # asked for without being defined where Transformer Engine is absent
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.ops = SimpleNamespace(gmm=_grouped)
    parallel_state.initialize_model_parallel(tp, pp)


def _grouped(x: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """What the package `grouped_gemm` computes on a GPU: each expert's rows times its matrix."""
    assert not trans_b
    return torch.cat([part @ weight for part, weight in zip(x.split(rows.tolist()), weights, strict=True)])


def functions() -> dict[str, Any]:
    """The activation functions of the families, as megatron's own configurations name them."""
    from megatron.core.activations import fast_gelu, squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "relu": torch.nn.functional.relu,
        "fast_gelu": fast_gelu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }


def build(family: Family, spec: str = "te", grouped: bool = False, drafting: bool = False) -> Any:
    """This rank's part of the model. `grouped` builds the experts of a layer as one module, `drafting` a layer besides
    that predicts one token more.
    """
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = family.config | {"activation_func": functions()[family.activation], **UNFUSED}
    fields.update(moe_grouped_gemm=False, layernorm_zero_centered_gamma=False)
    tp, pp = ranks.get_tensor_model_parallel_world_size(), ranks.get_pipeline_model_parallel_world_size()
    fields.update(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32)
    if pp > 1:  # three layers: two and one
        fields.update(num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=1)
    later = {name: fields.pop(name) for name in [*fields] if name.startswith("yarn_")}  # of Megatron-Bridge's provider
    config = (MLATransformerConfig if family.latent else TransformerConfig)(**fields)
    vars(config).update(later)
    block = _block(family, config, spec, grouped)
    first, last = ranks.is_pipeline_first_stage(), ranks.is_pipeline_last_stage()
    more = dict(family.model, pre_process=first, post_process=last, parallel_output=False)
    if drafting:
        config.mtp_num_layers = 1
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(config, block, **more)
    if family.gemma and first:  # as Megatron-Bridge's and NeMo's mixin do
        model.embedding.register_forward_hook(lambda _module, _args, out: out * family.config["hidden_size"] ** 0.5)
    config.bf16 = grouped  # else megatron's grouped experts refuse to run; floats stay what they are
    return model.eval()


def _block(family: Family, config: Any, spec: str, grouped: bool) -> Any:
    """Layers of megatron's local spec; those of `te` have in checkpoints the names of Transformer Engine's, which
    megatron itself gives such layers where ModelOpt wants them.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = []
    for number, renamed in enumerate(get_gpt_modelopt_spec(config, remap_te_layernorm=True).layer_specs):
        experts, same = config.num_moe_experts if family.routed(number) else None, (config.qk_layernorm, family.latent)
        layer = get_gpt_layer_local_spec(experts, grouped and bool(experts), *same, normalization=config.normalization)
        if spec == "te":
            layer.submodules.sharded_state_dict_keys_map = renamed.submodules.sharded_state_dict_keys_map
        if family.zero_centred:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ZeroCentred
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        if family.zero_centred and config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = ZeroCentred
        if family.latent:
            attention.core_attention = latent_attention()
        if family.post_norms:
            attention.linear_proj = mlp.linear_fc2 = _normed_linear()
        layers.append(layer)
    if config.pipeline_model_parallel_size > 1:
        assert not family.zero_centred and "moe_layer_freq" not in family.config
        return layers[0]  # of which megatron gives each stage its own
    return TransformerBlockSubmodules(layers, ZeroCentred if family.zero_centred else WrappedTorchNorm)


def latent_attention() -> type:
    """Megatron's own attention, told that values are narrower than keys: as it is, only Transformer Engine's is."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return Attention


def _normed_linear() -> type:
    """Megatron-Bridge's class of Gemma 2 and 3, on megatron's own linear; its mappings know it by the name."""
    from megatron.core.tensor_parallel import RowParallelLinear

    class TERowParallelLinearLayerNorm(RowParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = ZeroCentred(config, output_size, config.layernorm_epsilon)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    return TERowParallelLinearLayerNorm


@torch.no_grad()
def fill(model: Any, seed: int) -> None:
    """Random weights; nothing stays at a constant that hides a mix-up, padded rows of the vocabulary included."""
    numbers = torch.Generator().manual_seed(seed)
    centred = any(isinstance(module, ZeroCentred) for module in model.modules())
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("expert_bias")]
    for name, tensor in sorted([*model.named_parameters(), *biases]):
        tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.15)
        tensor += 1.0 * ("layernorm.weight" in name and not centred)


def made(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Ids, logits of the real vocabulary, and the tensors of the module by its own (local) names."""
    model = filled(name)
    ids = _ids()
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items() if "_extra_state" not in key}
    return ids.numpy(), answer(model, ids), state


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


def filled(name: str, spec: str = "te") -> Any:
    model = build(EVERY[name], spec)
    fill(model, sum(map(ord, name)))
    return model


@torch.no_grad()
def answer(model: Any, ids: torch.Tensor) -> np.ndarray:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()  # True: not looked at
    return np.asarray(model(ids, positions, mask)[..., :VOCAB])


def drafted(name: str, spec: str) -> list[str]:
    """Names that a layer which predicts one token more adds to a checkpoint: of tensors and states."""
    without, with_it = (_keys(build(EVERY[name], spec, drafting=drafting)) for drafting in (False, True))
    return sorted(with_it - without)


@torch.no_grad()
def drafts(name: str, directory: str, spec: str, saves: bool) -> np.ndarray:
    """Logits of a layer that predicts one token more; the model is saved, or loaded strictly."""
    from megatron.core import dist_checkpointing

    model = build(EVERY[name], spec, drafting=True)
    fill(model, sum(map(ord, name)))
    if saves:
        Path(directory).mkdir(parents=True)
        dist_checkpointing.save({"model": _sharded(model, "", "stacked"), "checkpoint_version": 3.0}, directory)
    else:
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
        load(model, directory, strict="raise_all" if spec == "local" else "assume_ok_unexpected")
    ids, found = _ids(), []
    model.mtp.register_forward_hook(lambda _module, _args, out: found.append(out))
    positions, mask = torch.arange(ids.shape[1]).expand_as(ids), torch.ones(1, 1, *[ids.shape[1]] * 2).triu(1).bool()
    model(ids, positions, mask, labels=ids)
    hidden = found[0].chunk(2)[1]  # of the model, of the layer that drafts; tokens, batch, hidden
    return np.asarray(model.output_layer(hidden)[0].transpose(0, 1)[..., :VOCAB])


def _keys(model: Any) -> set[str]:
    return {part.key for part in _sharded(model, "", "stacked").values()}


@torch.no_grad()
def save(name: str, out: str, source: str | None, options: dict[str, Any]) -> None:
    """Write a torch_dist directory by megatron's own save, with the weights of `source`, written by one rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    family = EVERY[name]
    if source is None:
        model = filled(name, options["spec"])
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
    model = mtq.quantize(filled(name), copy.deepcopy(getattr(mtq, scheme)), lambda model: answer(model, ids))
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


def load_and_run(
    name: str, directory: str, ids: np.ndarray, prefix: str, layers: str, strict: str, spec: str, grouped: bool
) -> np.ndarray:
    model = build(EVERY[name], spec, grouped)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
    load(model, directory, prefix, layers, strict)
    return answer(model, torch.from_numpy(ids))


def written_family(directory: str) -> Family:
    """The model as run_config.yaml beside a checkpoint describes it, and no other file."""
    import yaml
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    said = yaml.safe_load((Path(directory) / "run_config.yaml").read_text())["model"]
    kind = MLATransformerConfig if said.get("multi_latent_attention") else TransformerConfig
    own = {field.name for field in dataclasses.fields(kind)} - {"params_dtype", "bf16", "fp16"}
    config = {key: value for key, value in said.items() if key in own or key.startswith("yarn_")}
    config |= {"activation_func": said["activation_func"]["_target_"].rpartition(".")[2], **NOT_WRITTEN}
    model = {key: said[key] for key in GPT if key in said}
    if model["position_embedding_type"] == "yarn":  # what the provider has as attributes
        config = {"yarn_mscale": None, "yarn_mscale_all_dim": None} | config
    rows = said["make_vocab_size_divisible_by"]
    model |= {"vocab_size": -(-said["vocab_size"] // rows) * rows, "max_sequence_length": said["seq_length"]}
    return Family(config, model, {"model_type": "gemma" if "Gemma" in said["_target_"] else ""}, "")


def run_written(directory: str, ids: np.ndarray) -> np.ndarray:
    """Logits of the model that run_config.yaml describes, with the weights beside it, names of the local spec."""
    model = build(written_family(directory), "local")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(float("nan"))
    load(model, directory, strict="raise_all")
    return answer(model, torch.from_numpy(ids))


def part(name: str, source: str) -> tuple[int, int, dict[str, Any]]:
    """This rank's tensor and pipeline number, and its part of the module's state dict."""
    from megatron.core import parallel_state as ranks

    model = build(EVERY[name])
    load(model, source)
    state = {key: value.numpy() for key, value in model.state_dict().items() if "_extra_state" not in key}
    return ranks.get_tensor_model_parallel_rank(), ranks.get_pipeline_model_parallel_rank(), state
