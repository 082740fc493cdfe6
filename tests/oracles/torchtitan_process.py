"""torchtitan's models and adapters on a CPU, one era a process, for tests.oracles.torchtitan_oracle. It uses no
bridge."""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.models import torchtitan_families as F
from tests.oracles.stand_ins import stand_in

ERA_02 = Path(sys.prefix) / "torchtitan-0.2"  # the older wheel, beside the environment's own; see the Makefile
SEQUENCE = 72  # a wrong RoPE permutation shows after some twenty positions


def start(era: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if era == "0.2":
        if not ERA_02.is_dir():
            raise RuntimeError(f"{ERA_02} is missing: the Makefile installs torchtitan 0.2 there")
        sys.path.insert(0, str(ERA_02))
        stand_in("torch.utils.tensorboard", "torchdata")  # its trainer's; models and adapters never call them

    histogram = torch.histc  # the CPU's has no integers
    torch.histc = lambda x, *args, **kwargs: histogram(x.float(), *args, **kwargs).to(x.dtype)
    if era == "0.3":
        from torchtitan.models.common.attention import FlexAttention

        FlexAttention.forward = _causal  # its own compiles a kernel
        torch.Tensor.bfloat16 = lambda x: x  # experts multiply in bfloat16
        torch._grouped_mm = _grouped  # the CPU's wants extents in multiples of eight


def _causal(
    _: Any, q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, out_transform: Any = None, **__: Any
) -> torch.Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    heads = [x.transpose(1, 2) for x in (q, k, v)]  # batch, heads, positions, size
    out = attend(*heads, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)
    if out_transform is None:
        return out
    keys = heads[1].repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores = heads[0] @ keys.transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return out_transform(out, scores.masked_fill(hidden, -torch.inf).logsumexp(-1).transpose(1, 2))


def _grouped(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    rows = torch.split(x, torch.diff(offs, prepend=offs.new_zeros(1)).tolist())
    return torch.cat([part @ weight for part, weight in zip(rows, weights, strict=True)])


def made(era: str, name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The native state dict, the same by the adapter under Hugging Face names, ids, and the model's logits."""
    model, adapter = _build(era, name)
    numbers = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for key, tensor in sorted([*model.named_parameters(), *_biases(name, model)]):
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.15 + 1.0 * ("norm" in key))
    native = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    ids = torch.randint(0, F.VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.eval()(ids)
    own = {"gpt_oss": _gpt_oss, "llama4": _llama4}.get(name)
    hf = own(adapter, native) if own else adapter.to_hf(dict(native))
    return _arrays(native), _arrays(hf), ids.numpy(), logits.float().numpy()


def _gpt_oss(adapter: Any, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter knows the experts by their names of 0.2, and as what is published in blocks: [experts, out, in]."""
    old = {re.sub(r"(mlp[12]_(weight|bias))_\w+$", r"\1", key): tensor for key, tensor in native.items()}
    found = adapter.to_hf(old).items()
    return {key.removesuffix("_blocks"): part.mT if key.endswith("_blocks") else part for key, part in found}


def _llama4(adapter: Any, native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter knows the text model of one with images, and leaves out dense layers: those are named as Llama's."""
    found = {key.removeprefix("language_model."): tensor for key, tensor in adapter.to_hf(dict(native)).items()}
    dense = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for key, tensor in native.items():
        if ".feed_forward." in key:
            stem, matrix, _ = key.rsplit(".", 2)
            found[f"model.{stem}.{dense[matrix]}.weight"] = tensor
    return found


@torch.no_grad()
def load_and_run(
    era: str, name: str, directory: str, ids: np.ndarray, config: dict[str, Any] | None = None
) -> np.ndarray:
    """Logits of a model whose whole state torch loads from a directory; what that lacks is an error.

    config: of transformers, whose numbers the run gives the model where torchtitan's has them.
    """
    import torch.distributed.checkpoint as dcp

    told = _told(config or {})
    with mock.patch.multiple(F, **told) if told else nullcontext():
        model, _ = _build(era, name)
    _tell(model, config or {})
    state = {key: torch.full_like(tensor, float("nan")) for key, tensor in model.state_dict().items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    model.load_state_dict(state, strict=True)
    return np.asarray(model.eval()(torch.from_numpy(ids)).float())


def _told(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a config in place of those of the tiny models."""
    if not config:
        return {}
    rope = config["rope_parameters"]
    found = {"BASE": rope["rope_theta"], "TOP_K": config.get("num_experts_per_tok", F.TOP_K), "GPT_OSS": config}
    found |= {"ROUTE_SCALE": config.get("routed_scaling_factor", F.ROUTE_SCALE)}
    names = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor", "factor": "scaling_factor"}
    names |= {"original_max_position_embeddings": "original_max_position_embeddings"}
    if rope["rope_type"] == "llama3":
        found["LLAMA_SCALING"] = {"scaling": "llama"} | {named: rope[key] for key, named in names.items()}
    else:
        found["LLAMA_SCALING"] = {"scaling": "none"}
    if (config.get("n_group") or 1) > 1:
        found["GROUPS"] = {
            "router_num_expert_groups": config["n_group"], "router_num_limited_groups": config["topk_group"],
        }  # fmt: skip
    return found


def _tell(model: Any, config: dict[str, Any]) -> None:
    """Epsilons, other than of latents, and whether shares of experts are divided by their sum."""
    latents = ("q_norm", "kv_norm") if "kv_lora_rank" in config else ()
    for name, module in model.named_modules():
        if "rms_norm_eps" in config and hasattr(module, "eps") and not name.endswith(latents):
            module.eps = config["rms_norm_eps"]
        if "norm_topk_prob" in config and hasattr(module, "route_norm"):
            module.route_norm = config["norm_topk_prob"]


def from_hf(era: str, name: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    adapter = _build(era, name)[1]
    return _arrays(adapter.from_hf({key: torch.from_numpy(array) for key, array in state.items()}))


def drafts_from_hf(state: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The adapter's tensors of a DeepSeek-V3 with one draft layer, and the names of the model's own state."""
    from torchtitan.models import deepseek_v3

    config = _config_03("deepseek_v3")
    config.mtp_layers = deepseek_v3._build_mtp_layers(config.layers[-1], dim=F.DIM, num_mtp_layers=1)
    adapter = _adapter("0.3", "deepseek_v3")(config, None)
    made = adapter.from_hf({key: torch.from_numpy(array) for key, array in state.items()})
    return _arrays(made), sorted(config.build().state_dict())


def _biases(name: str, model: Any) -> list[tuple[str, torch.Tensor]]:
    """The router's correction is a buffer, which a checkpoint holds; where transformers has none it stays zero."""
    if name in ("qwen3-moe", "gpt_oss", "llama4"):
        return []
    return [(key, tensor) for key, tensor in model.named_buffers() if "expert_bias" in key]


def _arrays(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.ascontiguousarray(tensor.numpy()) for key, tensor in state.items() if hasattr(tensor, "numpy")}


@torch.no_grad()
def _build(era: str, name: str) -> tuple[Any, Any]:
    family = name.partition("-")[0]
    config = (_config_02 if era == "0.2" else _config_03)(name)
    if era == "0.2":
        model = _model_02(family)(config)
        model.init_weights(torch.device("cpu"))
    else:
        model = config.build()
    if family == "deepseek_v3":  # transformers has no other epsilon for the norms of the latents
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = F.DEEPSEEK["rms_norm_eps"]
    return model, _adapter(era, family)(config, None)


def _adapter(era: str, family: str) -> Any:
    if era == "0.2":
        from torchtitan.models.deepseek_v3.model import state_dict_adapter as deepseek
        from torchtitan.models.llama3.model import state_dict_adapter as llama
        from torchtitan.models.llama4.model import state_dict_adapter as llama4
        from torchtitan.models.qwen3.model import state_dict_adapter as qwen
    else:
        from torchtitan.models.deepseek_v3 import state_dict_adapter as deepseek
        from torchtitan.models.gpt_oss import state_dict_adapter as gpt_oss
        from torchtitan.models.llama3 import state_dict_adapter as llama
        from torchtitan.models.qwen3 import state_dict_adapter as qwen
    if family == "llama4":
        return llama4.Llama4StateDictAdapter
    if family == "gpt_oss":
        return gpt_oss.GptOssStateDictAdapter
    return {
        "llama3": llama.Llama3StateDictAdapter,
        "qwen3": qwen.Qwen3StateDictAdapter,
        "deepseek_v3": deepseek.DeepSeekV3StateDictAdapter,
    }[family]


def _model_02(family: str) -> Any:
    from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama4.model.model import Transformer as Llama4
    from torchtitan.models.qwen3.model.model import Qwen3Model

    return {"llama3": Transformer, "llama4": Llama4, "qwen3": Qwen3Model, "deepseek_v3": DeepSeekV3Model}[family]


def _config_02(name: str) -> Any:
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama4.model.args import RoPEScalingArgs
    from torchtitan.models.llama4.model.args import TransformerModelArgs as Llama4Args
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    same = {"dim": F.DIM, "n_layers": F.LAYERS, "n_heads": F.HEADS, "vocab_size": F.VOCAB, "rope_theta": F.BASE}
    moe = {"num_experts": F.EXPERTS, "top_k": F.TOP_K, "route_norm": True, "use_grouped_mm": False}
    if name == "llama3":
        return TransformerModelArgs(**same, n_kv_heads=F.KV_HEADS, multiple_of=8, max_seq_len=F.LLAMA_POSITIONS)
    if name == "llama4":
        routed = MoEArgs(**moe | {"route_norm": False})
        same |= {"n_kv_heads": F.KV_HEADS, "multiple_of": 8, "norm_eps": F.LLAMA4["rms_norm_eps"]}
        if "scaling_factor" in F.LLAMA_SCALING:
            same["rope_scaling_args"] = RoPEScalingArgs(**{k: v for k, v in F.LLAMA_SCALING.items() if k != "scaling"})
        return Llama4Args(**same, max_seq_len=F.POSITIONS, moe_args=routed)
    if name.startswith("qwen3"):
        return Qwen3ModelArgs(
            **same,
            n_kv_heads=F.KV_HEADS,
            head_dim=F.HEAD_DIM,
            hidden_dim=F.FFN,
            max_seq_len=F.POSITIONS,
            enable_weight_tying=name == "qwen3-tied",
            moe_enabled=name == "qwen3-moe",
            moe_inter_dim=F.EXPERT_FFN,
            moe_args=MoEArgs(**moe, num_shared_experts=0, score_func="softmax", score_before_experts=False),
        )
    made = DeepSeekV3ModelArgs(
        **same,
        **F.MLA,
        inter_dim=F.FFN,
        moe_inter_dim=F.EXPERT_FFN,
        max_seq_len=F.POSITIONS,
        q_lora_rank=F.LATENT_QUERY if name.endswith("latent") else 0,
        moe_args=MoEArgs(
            **moe,
            num_shared_experts=F.SHARED,
            score_func="sigmoid",
            route_scale=F.ROUTE_SCALE,
            score_before_experts=False,
        ),
    )
    made.moe_impl = "standard"  # its trainer sets it
    return made


def _config_03(name: str) -> Any:
    from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear

    deep, long = name.startswith("deepseek"), name == "llama3"
    module = llama3 if long else deepseek_v3 if deep else gpt_oss if name == "gpt_oss" else qwen3
    kind = {llama3: "Llama3Model", qwen3: "Qwen3Model", deepseek_v3: "DeepSeekV3Model", gpt_oss: "GptOssModel"}[module]
    norm = qwen3._qwen3_norm if module is qwen3 else lambda dim: module.RMSNorm.Config(normalized_shape=dim)
    same: dict[str, Any] = {"n_layers": F.LAYERS, "dim": F.DIM, "n_heads": F.HEADS, "attn_backend": "flex"}
    if long:
        rope = ComplexRoPE.Config(dim=F.DIM // F.HEADS, max_seq_len=F.LLAMA_POSITIONS, theta=F.BASE, **F.LLAMA_SCALING)
        layers = llama3._build_llama3_layers(**same, n_kv_heads=F.KV_HEADS, hidden_dim=F.LLAMA_FFN, rope=rope)
    elif deep:
        layers = _deepseek_03(name, same)
    elif module is gpt_oss:
        layers = _gpt_oss_03(same)
    else:
        rope = CosSinRoPE.Config(dim=F.HEAD_DIM, max_seq_len=F.POSITIONS, theta=F.BASE)
        same |= {"n_kv_heads": F.KV_HEADS, "head_dim": F.HEAD_DIM, "rope": rope}
        if name == "qwen3-moe":
            experts = {"moe_hidden_dim": F.EXPERT_FFN, "num_experts": F.EXPERTS, "top_k": F.TOP_K}
            layers = qwen3._build_qwen3_moe_layers(**same, **experts, moe_comm_backend="standard")
        else:
            layers = qwen3._build_qwen3_layers(**same, hidden_dim=F.FFN)
    tied = {"enable_weight_tying": True} if name == "qwen3-tied" else {}
    return getattr(module, kind).Config(
        dim=F.DIM,
        vocab_size=F.VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=F.VOCAB, embedding_dim=F.DIM),
        norm=norm(F.DIM),
        lm_head=Linear.Config(in_features=F.DIM, out_features=F.VOCAB),
        layers=layers,
        **tied,
    )


def _gpt_oss_03(same: dict[str, Any]) -> Any:
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE

    rope = F.GPT_OSS["rope_parameters"]
    layers = gpt_oss._build_gptoss_layers(
        **{key: value for key, value in same.items() if key != "n_heads"},
        hidden_dim=F.EXPERT_FFN,
        num_experts=F.EXPERTS,
        top_k=F.TOP_K,
        load_balance_coeff=1e-3,
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(
            dim=F.HEAD_DIM,
            max_seq_len=F.POSITIONS,
            theta=F.BASE,
            scaling="none" if rope["rope_type"] == "default" else "yarn",
            rope_factor=rope.get("factor", 1.0),
            beta_fast=rope.get("beta_fast", 32.0),
            beta_slow=rope.get("beta_slow", 1.0),
            truncate=rope.get("truncate", True),
            original_seq_len=rope.get("original_max_position_embeddings", F.POSITIONS),
        ),
    )
    for number, layer in enumerate(layers):
        own = {
            "n_heads": F.HEADS,
            "n_kv_heads": F.KV_HEADS,
            "head_dim": F.HEAD_DIM,
            "dim": F.DIM,
            "rope": layer.attention.rope,
        }
        window = layer.attention.sliding_window_size
        layer.attention = gpt_oss._make_gptoss_attn_config(
            **own, layer_id=number, attn_backend="flex", sliding_window_size=window
        )
        layer.moe.routed_experts.inner_experts.swiglu_limit = F.GPT_OSS["swiglu_limit"]
    return layers


def _deepseek_03(name: str, same: dict[str, Any]) -> Any:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    return deepseek_v3._build_dsv3_layers(
        **same,
        **F.MLA,
        n_dense_layers=1,
        q_lora_rank=F.LATENT_QUERY if name.endswith("latent") else 0,
        mscale=1.0,
        dense_hidden_dim=F.FFN,
        moe_hidden_dim=F.EXPERT_FFN,
        num_experts=F.EXPERTS,
        num_shared_experts=F.SHARED,
        router_top_k=F.TOP_K,
        router_score_func="sigmoid",
        router_route_scale=F.ROUTE_SCALE,
        router_route_norm=True,
        **F.GROUPS,
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=F.MLA["qk_rope_head_dim"], max_seq_len=F.POSITIONS, theta=F.BASE),
    )
