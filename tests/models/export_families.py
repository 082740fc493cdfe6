"""Tiny random decoders whose matrices fit blocks of 128: what ModelOpt exports and target `hf` is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

# hidden 256, ffn 384, vocab 330: extents differ pairwise wherever the architecture lets them
TEXT: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = TEXT | {"num_key_value_heads": 2}
WIDE = GQA | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # q gives 512, k and v 256
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLA: dict[str, Any] = TEXT | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
GPT2: dict[str, Any] = {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 330, "n_positions": 64}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**WIDE)),
    "llama-tied": lambda: T.LlamaForCausalLM(T.LlamaConfig(**GQA, tie_word_embeddings=True)),
    "llama-biased": lambda: T.LlamaForCausalLM(T.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**GQA)),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**GQA)),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**WIDE)),
    "gemma": lambda: T.GemmaForCausalLM(T.GemmaConfig(**WIDE)),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**WIDE)),
    "gemma3": lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**WIDE)),
    "phi": lambda: T.PhiForCausalLM(T.PhiConfig(**TEXT)),
    "phi3": lambda: T.Phi3ForCausalLM(T.Phi3Config(**GQA)),
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(**GPT2)),
    "gpt-neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**TEXT)),
    "gpt-bigcode": lambda: T.GPTBigCodeForCausalLM(T.GPTBigCodeConfig(**GPT2)),
    "gptj": lambda: T.GPTJForCausalLM(T.GPTJConfig(**GPT2, rotary_dim=32)),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(
            vocab_size=330, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, ffn_dim=384,
            max_position_embeddings=64, word_embed_proj_dim=256,
        )
    ),
    "falcon": lambda: T.FalconForCausalLM(
        T.FalconConfig(vocab_size=330, hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
    ),
    "mpt": lambda: T.MptForCausalLM(T.MptConfig(d_model=256, n_heads=4, n_layers=2, vocab_size=330, max_seq_len=64)),
    "olmo": lambda: T.OlmoForCausalLM(T.OlmoConfig(**GQA)),
    "olmo2": lambda: T.Olmo2ForCausalLM(T.Olmo2Config(**GQA)),
    "cohere": lambda: T.CohereForCausalLM(T.CohereConfig(**GQA)),
    "cohere2": lambda: T.Cohere2ForCausalLM(T.Cohere2Config(**GQA)),
    "stablelm": lambda: T.StableLmForCausalLM(T.StableLmConfig(**GQA)),
    "starcoder2": lambda: T.Starcoder2ForCausalLM(T.Starcoder2Config(**GQA)),
    "granite": lambda: T.GraniteForCausalLM(T.GraniteConfig(**GQA)),
    "nemotron": lambda: T.NemotronForCausalLM(T.NemotronConfig(**WIDE)),
    "persimmon": lambda: T.PersimmonForCausalLM(T.PersimmonConfig(**TEXT)),
    "smollm3": lambda: T.SmolLM3ForCausalLM(T.SmolLM3Config(**GQA)),
    "glm": lambda: T.GlmForCausalLM(T.GlmConfig(**WIDE)),
    "glm4": lambda: T.Glm4ForCausalLM(T.Glm4Config(**WIDE)),
    "helium": lambda: T.HeliumForCausalLM(T.HeliumConfig(**GQA, head_dim=64)),
    "exaone4": lambda: T.Exaone4ForCausalLM(T.Exaone4Config(**WIDE)),
    "arcee": lambda: T.ArceeForCausalLM(T.ArceeConfig(**GQA)),
    "apertus": lambda: T.ApertusForCausalLM(T.ApertusConfig(**GQA, rope_parameters=ROPE)),
    "biogpt": lambda: T.BioGptForCausalLM(T.BioGptConfig(**TEXT)),
    "codegen": lambda: T.CodeGenForCausalLM(T.CodeGenConfig(**GPT2, rotary_dim=32)),
    "ernie4.5": lambda: T.Ernie4_5ForCausalLM(T.Ernie4_5Config(**WIDE)),
    "gpt-neo": lambda: T.GPTNeoForCausalLM(
        T.GPTNeoConfig(
            vocab_size=330, hidden_size=256, num_layers=2, num_heads=4, max_position_embeddings=64,
            attention_types=[[["global", "local"], 1]],
        )
    ),
    "hunyuan": lambda: T.HunYuanDenseV1ForCausalLM(T.HunYuanDenseV1Config(**WIDE)),
    "lfm2": lambda: T.Lfm2ForCausalLM(
        T.Lfm2Config(**GQA, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    ),
    "olmo3": lambda: T.Olmo3ForCausalLM(T.Olmo3Config(**GQA)),
    "qwen3.5": lambda: T.Qwen3_5ForCausalLM(
        T.Qwen3_5TextConfig(
            **WIDE, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=64,
            linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        )
    ),
    "seed-oss": lambda: T.SeedOssForCausalLM(T.SeedOssConfig(**WIDE)),
    "vaultgemma": lambda: T.VaultGemmaForCausalLM(T.VaultGemmaConfig(**WIDE)),
    "bert": lambda: T.BertModel(T.BertConfig(**TEXT)),
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**GQA, num_local_experts=3)),
    "qwen3-moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**WIDE, **EXPERTS, mlp_only_layers=[1])),
    "qwen2-moe": lambda: T.Qwen2MoeForCausalLM(
        T.Qwen2MoeConfig(**GQA, **EXPERTS, shared_expert_intermediate_size=256)
    ),
    "olmoe": lambda: T.OlmoeForCausalLM(T.OlmoeConfig(**GQA, num_experts=3, num_experts_per_tok=2)),
    "deepseek-v2": lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**MLA)),
    "deepseek-v3": lambda: T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**MLA)),
}  # fmt: skip
# Whose matrices, norms and names are of a kind that another family above has: grids leave them to `product`.
ALIKE = (
    "arcee", "cohere2", "ernie4.5", "exaone4", "glm4", "gpt-bigcode", "granite", "helium", "hunyuan", "mistral",
    "olmo3", "qwen2", "seed-oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
EXPERT_FAMILIES = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "deepseek-v2", "deepseek-v3")


def build(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The family's model with random weights; norms away from one, so that what multiplies into them is seen."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(0, 0.05)
            if "norm" in name or ".ln_" in name:
                tensor += 0.7
    return model


def tokens() -> list[torch.Tensor]:
    """Calibration batches: every id of a small range, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (2, 24), generator=generator) for _ in range(2)]
