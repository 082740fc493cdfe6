"""What Megatron-Bridge says of a family: its provider's run_config and its own mapping of the weights.

It runs in a process of its own, with modules standing in for Transformer Engine, which it imports and this never calls.
"""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.models.megatron_configs import DIVISIBLE
from tests.models.megatron_families import BASE, EVERY, VOCAB, Family, te_name
from tests.oracles import megatron_process
from tests.oracles.stand_ins import stand_in

# Mixtral has no bridge in 0.3.1: its names in Megatron are those of Qwen3-MoE. GPT and Starcoder 2 have none.
BRIDGES = {
    "llama": "llama.llama_bridge.LlamaBridge",
    "mistral": "mistral.mistral_bridge.MistralBridge",
    "qwen2": "qwen.qwen2_bridge.Qwen2Bridge",
    "qwen3": "qwen.qwen3_bridge.Qwen3Bridge",
    "qwen3_moe": "qwen.qwen3_moe_bridge.Qwen3MoEBridge",
    "gemma": "gemma.gemma_bridge.GemmaBridge",
    "deepseek_v3": "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge",
    "gemma2": "gemma.gemma2_bridge.Gemma2Bridge",
    "gemma3_text": "gemma.gemma3_bridge.Gemma3ModelBridge",
    "nemotron": "nemotron.nemotron_bridge.NemotronBridge",
    "mixtral": "qwen.qwen3_moe_bridge.Qwen3MoEBridge",
    "glm4_moe": "glm.glm45_bridge.GLM45Bridge",
    "gpt_oss": "gpt_oss.gpt_oss_bridge.GPTOSSBridge",
}


MIXTRAL = re.compile("mlp.gate.|mlp.experts|gate_proj|up_proj|down_proj")
NAMES = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts": "block_sparse_moe.experts"}
NAMES |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def start(store: str) -> None:
    megatron_process.start(0, 1, 1, store)
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # it asks for Transformer Engine: first truly
    stand_in("transformer_engine")


def _bridge(family: Family) -> Any:
    module, _, name = BRIDGES[family.hf["model_type"]].rpartition(".")
    return getattr(importlib.import_module(f"megatron.bridge.models.{module}"), name)()


def to_hf(name: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The module's tensors under Hugging Face names, by Megatron-Bridge's own mappings, row for row."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("ZeroCentred", "replicated")
    family = EVERY[name]
    model, bridge = megatron_process.build(family), _bridge(family)
    bridge.hf_config = SimpleNamespace(num_local_experts=family.experts)
    registry, modules, found = bridge.mapping_registry(), dict(model.named_modules()), {}
    for key, array in state.items():
        named = te_name(key, family, True)
        mapping = registry.megatron_to_hf_lookup(named)
        assert mapping is not None, key
        parts = mapping.megatron_to_hf(torch.from_numpy(array.copy()), modules[key.rpartition(".")[0]])
        found |= bridge.maybe_modify_converted_hf_weight(
            SimpleNamespace(param_name=named, global_param_name=named), parts, {}
        )
    padded = ("model.embed_tokens.weight", "lm_head.weight")
    real = {key: tensor[:VOCAB] if key in padded else tensor for key, tensor in found.items()}
    if family.hf["model_type"] == "mixtral":
        real = {MIXTRAL.sub(lambda match: NAMES[match[0]], key): tensor for key, tensor in real.items()}
    return {key: tensor.numpy() for key, tensor in real.items()}


def provider(name: str) -> tuple[Any, list[str]]:
    """Megatron-Bridge's description of the model, and the fields of which the family says otherwise. It is derived
    from the Hugging Face config where there is a bridge for that.
    """
    import transformers
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    family = EVERY[name]
    fields = family.config | {"activation_func": megatron_process.functions()[family.activation]}
    fields |= {key: value for key, value in family.model.items() if key not in ("max_sequence_length", "vocab_size")}
    own = {"vocab_size": VOCAB, "seq_length": family.positions, "make_vocab_size_divisible_by": DIVISIBLE}
    own |= {"should_pad_vocab": True, "params_dtype": torch.float32, "bf16": False, "fp16": False}
    own |= {"mtp_num_layers": None}  # its GLM has a draft layer by default, and these models have none
    if family.hf["model_type"] in ("gpt2", "mixtral", "starcoder2"):
        made = GPTModelProvider(**fields)
    else:
        hf = {key: value for key, value in family.hf.items() if key not in ("model_type", "torch_dtype")}
        config = transformers.AutoConfig.for_model(family.hf["model_type"], **hf)
        config.rope_theta = BASE  # where transformers 4 had it, and the next one
        config.partial_rotary_factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
        made = _bridge(family).provider_bridge(SimpleNamespace(config=config, generation_config=None))
    differing = [key for key, value in fields.items() if getattr(made, key) != value]
    for key, value in (fields | own).items():
        setattr(made, key, value)
    return made, differing


def differing(name: str) -> list[str]:
    """The fields of a family that Megatron-Bridge derives otherwise from the same Hugging Face config."""
    return provider(name)[1]


def run_config(name: str, tp: int, pp: int) -> str:
    """run_config.yaml with the model's section, by Megatron-Bridge's own dump."""
    import yaml
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    section = _ConfigContainerBase._convert_value_to_dict(provider(name)[0])
    section |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    with safe_yaml_representers():
        return str(yaml.safe_dump({"_target_": "megatron.bridge.training.config.ConfigContainer", "model": section}))
