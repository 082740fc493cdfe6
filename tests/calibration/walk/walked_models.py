"""Batches for walks of tiny models: the last is held out, one of the others is padded; tiny MoE models."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.decoder_families import build

_GPT_OSS: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "num_local_experts": 5,
    "num_experts_per_tok": 3, "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# experts in one tensor of the checkpoint, with a quantizer of ModelOpt's for each
_GRANITE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# dense layers smaller than those with experts; in bfloat16, grouped products need rows of multiples of 16 bytes
_EVEN = {"hidden_size": 64, "moe_intermediate_size": 48, "intermediate_size": 40}
MIXTURES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": _EVEN,
    "GptOssForCausalLM": _GPT_OSS,
    "GraniteMoeForCausalLM": _GRANITE,
    "MixtralForCausalLM": {"hidden_size": 64},
    "Qwen3MoeForCausalLM": _EVEN,
    "Qwen3NextForCausalLM": _EVEN,
}

# Of tests.models.decoder_families one of each kind of block, and of what is carried past a block; grids leave the
# others to `product`, and tests/planning/test_trace.py has them.
KINDS = {
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "FalconForCausalLM",
    "Gemma4ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3NextForCausalLM",
    "JambaForCausalLM",
    "RecurrentGemmaForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "MambaForCausalLM",
}


def mixture(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of two layers, of which at least one has experts."""
    if MIXTURES[family] not in (_GPT_OSS, _GRANITE):
        return build(family, dtype, **MIXTURES[family])
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind._from_config(kind.config_class(**MIXTURES[family])).to(dtype).eval()
    model.config.architectures = [family]
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model


def batches(decoder: bool = False, count: int = 4) -> list[dict[str, Any]]:
    """Ids of a vocabulary of 97; a row of the second batch is padded on the left. `decoder`: with its inputs, too."""
    random = torch.Generator().manual_seed(7)
    made = []
    for at in range(count):
        ids = torch.randint(3, 97, (2, 24), generator=random)
        mask = torch.ones_like(ids)
        mask[0, : 5 * (at == 1)] = 0
        more = {"decoder_input_ids": torch.randint(3, 97, (2, 12), generator=random)} if decoder else {}
        made.append({"input_ids": ids, "attention_mask": mask, **more})
    return made
