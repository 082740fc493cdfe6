"""ModelOpt's `mcore_minitron` on a CPU: prune a family's Megatron model, and return what is left.

It runs in a process of its own, where plain torch stands in for Transformer Engine's linears; nothing is bridge's.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.models.megatron_families import EVERY, VOCAB, Family
from tests.oracles import megatron_process

Arrays = dict[str, np.ndarray]
SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_layers", "num_moe_experts")
SIZES += ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


class Linear(nn.Module):
    """Transformer Engine's linear, as far as megatron and ModelOpt call it."""

    te_return_bias = False

    def __init__(self, size_in: int, size_out: int, *, config: Any, bias: bool = False, **_: Any) -> None:
        super().__init__()
        assert not bias
        self.config, self.in_features, self.out_features, self.bias = config, size_in, size_out, None
        self.weight = nn.Parameter(torch.zeros(size_out, size_in))

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[Any, None]:
        return nn.functional.linear(x, self.weight), None


class Fused(Linear):
    """The same with the norm before it, whose output ModelOpt asks for."""

    return_layernorm_output = False

    def __init__(self, size_in: int, size_out: int, **options: Any) -> None:
        super().__init__(size_in, size_out, **options)
        self.layer_norm_weight, self.layer_norm_bias = nn.Parameter(torch.ones(size_in)), None

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[Any, None]:
        epsilon = self.config.layernorm_epsilon
        normed = nn.functional.rms_norm(x, (self.in_features,), self.layer_norm_weight, epsilon)
        out = nn.functional.linear(normed, self.weight)
        return ((out, normed) if self.return_layernorm_output else out), None


def start(store: str) -> None:
    """Join on gloo, and let ModelOpt find the modules that it imports."""
    megatron_process.start(0, 1, 1, store)
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # it asks for Transformer Engine: first truly
    import megatron.core.extensions.transformer_engine as extensions
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec

    gather = torch.distributed.all_gather_into_tensor  # gloo wants an axis where NCCL takes a scalar
    torch.distributed.all_gather_into_tensor = lambda out, x, **more: gather(out, x.reshape(-1), **more)

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.num_attention_heads = config.num_attention_heads

    names = ("ColumnParallelLinear", "RowParallelLinear", "Linear")
    names += ("ColumnParallelGroupedLinear", "RowParallelGroupedLinear")
    made = {f"TE{name}": type(f"TE{name}", (Linear,), {}) for name in names}
    for name, kind in (made | {"TELayerNormColumnParallelLinear": Fused, "TEDotProductAttention": Attention}).items():
        setattr(extensions, name, kind)
    multi_latent_attention.TELinear = made["TELinear"]
    norms: Any = types.ModuleType("transformer_engine.pytorch")
    norms.RMSNorm, norms.LayerNorm = nn.RMSNorm, type("LayerNorm", (nn.LayerNorm,), {})
    engine: Any = types.ModuleType("transformer_engine")
    engine.pytorch = norms
    hybrid = "megatron.core.models.hybrid"  # megatron-core 0.16.1 has none
    package, specs, models = (types.ModuleType(hybrid + end) for end in ("", ".hybrid_layer_specs", ".hybrid_model"))
    package.__path__ = []
    vars(specs)["hybrid_stack_spec"] = ModuleSpec(module=object)
    vars(models)["HybridModel"] = type("HybridModel", (nn.Module,), {})
    sys.modules |= {module.__name__: module for module in (engine, norms, package, specs, models)}


def prune(
    name: str, state: Arrays, batches: Sequence[np.ndarray], cells: Sequence[Mapping[str, int]]
) -> tuple[np.ndarray, list[tuple[Arrays, dict[str, Any]]]]:
    """Logits of the whole model on the first batch; then, of each cell's export_config, the tensors and sizes left."""
    whole = _model(EVERY[name], state)
    logits = megatron_process.answer(whole, torch.from_numpy(batches[0]))
    return logits, [_pruned(_model(EVERY[name], state), batches, cell) for cell in cells]


def combinations(space: Mapping[str, list[int]], width: float, depth: float) -> list[dict[str, int]]:
    """The grid of `search_best_arch_by_metrics` over these sizes; `width`, `depth`: the most that it leaves out."""
    from modelopt.torch.prune.plugins.mcore_minitron import MCoreMinitronSearcher

    with contextlib.redirect_stdout(io.StringIO()):
        made: list[dict[str, int]] = MCoreMinitronSearcher._generate_search_space_combos(dict(space), width, depth)
    return made


def _pruned(model: Any, batches: Sequence[np.ndarray], cell: Mapping[str, int]) -> tuple[Arrays, dict[str, Any]]:
    import modelopt.torch.prune as mtp
    from modelopt.torch.prune.plugins.mcore_minitron import get_mcore_minitron_config

    def run(model: Any) -> None:
        for ids in batches:
            megatron_process.answer(model, torch.from_numpy(ids))

    every_size = get_mcore_minitron_config(
        hidden_size_divisor=1, ffn_hidden_size_divisor=1, num_moe_experts_divisor=1, num_layers_divisor=1
    )
    with contextlib.redirect_stdout(io.StringIO()):
        smaller, _ = mtp.prune(
            model,
            mode=[("mcore_minitron", every_size)],
            constraints={"export_config": dict(cell)},
            dummy_input=None,
            config={"forward_loop": run},
        )
    left = {key: tensor.numpy().copy() for key, tensor in smaller.state_dict().items() if "_extra_state" not in key}
    return left, {size: getattr(smaller.config, size) for size in SIZES}


def _model(family: Family, state: Arrays) -> Any:
    """The model with these tensors, of the layers that ModelOpt knows."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = family.config | {"activation_func": megatron_process.functions()[family.activation]}
    kind = MLATransformerConfig if family.latent else TransformerConfig
    config = kind(**fields | megatron_process.UNFUSED | {"moe_grouped_gemm": False})
    options = family.model | {"vocab_size": VOCAB, "parallel_output": False}
    layers = [_layer(family, config, family.routed(number)) for number in range(config.num_layers)]
    model = GPTModel(config, TransformerBlockSubmodules(layers, WrappedTorchNorm), **options)
    model.load_state_dict({key: torch.from_numpy(array) for key, array in state.items()}, strict=False)
    wanted = {key for key in model.state_dict() if "_extra_state" not in key}
    assert wanted == state.keys(), wanted ^ state.keys()
    return model.eval()


def _layer(family: Family, config: Any, routed: bool) -> Any:
    import megatron.core.extensions.transformer_engine as extensions
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    experts = config.num_moe_experts if routed else None
    latent = {"multi_latent_attention": family.latent}
    layer = get_gpt_layer_local_spec(experts, False, normalization=config.normalization, **latent)
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_proj = extensions.TERowParallelLinear
    if family.latent:  # the norms of the latents are those of the fused linears
        attention.linear_q_down_proj = attention.linear_kv_down_proj = extensions.TELinear
        attention.linear_q_up_proj = attention.linear_kv_up_proj = Fused
        attention.core_attention = megatron_process.latent_attention()
    else:
        layer.submodules.input_layernorm = IdentityOp
        attention.linear_qkv, attention.core_attention = Fused, extensions.TEDotProductAttention
    if routed:
        for part in (mlp.experts.submodules, mlp.shared_experts.submodules):
            part.linear_fc1, part.linear_fc2 = extensions.TEColumnParallelLinear, extensions.TERowParallelLinear
    else:
        layer.submodules.pre_mlp_layernorm = IdentityOp
        mlp.linear_fc1, mlp.linear_fc2 = Fused, extensions.TERowParallelLinear
    return layer
