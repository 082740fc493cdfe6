"""`importance="minitron", order="importance"` gives the bytes of ModelOpt's `mcore_minitron`.

No batch here leaves an expert without tokens: ModelOpt's mean over none is NaN, and its choice of that expert's
channels is then arbitrary. Bridge adds nothing to their scores.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
import transformers

import bridge
from bridge.api.request import data_of
from bridge.calibration.data import Sampling, prepare
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import whole_of
from bridge.workflows.prune.trial import Trial
from tests.models.megatron_families import EVERY, VOCAB
from tests.oracles import megatron_oracle, prune_oracle
from tests.oracles.prune_grid import best_of_grid, combinations_of

CELLS = {
    "llama": (
        {"ffn": 40},
        {"hidden": 48},
        {"heads": 4},
        {"layers": 2},
        {"ffn": 52, "hidden": 36, "heads": 2, "layers": 1},
    ),
    "mixtral": ({"experts": 3}, {"moe_ffn": 20}, {"experts": 4, "moe_ffn": 24, "hidden": 44}),
    "deepseek": (  # of whose attention ModelOpt prunes hidden alone
        {"ffn": 40},
        {"hidden": 48},
        {"layers": 2},
        {"ffn": 52, "moe_ffn": 24, "shared_ffn": 48, "hidden": 36},
    ),
}
NAMES = {  # of a dim in ModelOpt's export_config
    "ffn": "ffn_hidden_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_layers",
    "experts": "num_moe_experts",
    "moe_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
}
FIELDS = {  # of config.json by Megatron's
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "num_layers": "num_hidden_layers",
}
LATENT = {  # Megatron's names of latent attention -> those of config.json's model
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
}
SPREAD = {"layers.0.": 0.1, "layers.1.": 0.05, "layers.2.": 0.2}  # the last layer changes most, the middle one least
random = torch.Generator().manual_seed(2)
BATCHES = [{"input_ids": torch.randint(0, VOCAB, (rows, 48), generator=random)} for rows in (5, 4, 6, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("family", CELLS)
def test_a_cut_equals_modelopts_to_the_byte(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    source = open_source(model)
    ids = [batch["input_ids"].numpy() for batch in prepare(BATCHES, source).batches]
    whole = in_megatron(source)
    cells = [{NAMES[dim]: size for dim, size in keep.items()} for keep in CELLS[family]]
    with ProcessPoolExecutor(1, megatron_oracle.processes(), prune_oracle.start, (str(tmp_path / "store"),)) as pool:
        logits, answers = pool.submit(prune_oracle.prune, family, whole, ids, cells).result()
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.from_numpy(ids[0])).logits, logits, atol=1e-5)  # the same model
    for keep, (wanted, sizes) in zip(CELLS[family], answers, strict=True):
        ours = bridge.pruned(model, keep, data=BATCHES, importance="minitron", order="importance")
        made = in_megatron(ours)
        assert made.keys() == wanted.keys()
        assert {name: array.shape for name, array in made.items()} == {name: wanted[name].shape for name in made}
        assert not [name for name in made if made[name].tobytes() != wanted[name].tobytes()], keep
        assert sizes_of(ours.config).items() <= sizes.items()


@pytest.mark.slow
def test_a_search_costs_less_than_modelopts_grid_at_the_same_budget() -> None:
    source = open_source("examples/models/tiny-llama")
    found = bridge.search(source, {"parameters": "70%"}, importance="minitron", samples=16, sequence=64)
    whole, data = whole_of(source), data_of(source, None, Sampling(16, 64))
    trial = Trial(whole, data, "minitron", repair=False, device=None)
    assert found.scores
    trial.prepare(None, found.scores.scores)
    best = best_of_grid(whole, combinations_of(whole), found.limit, trial.cost)
    assert best
    keep, size = best
    assert size <= found.limit
    assert all(size >= 0.6 * whole.before[dim] for dim, size in keep.items())
    assert found.cost < 0.6 * trial.cost(keep)


def random_model(family: str) -> Any:
    """The family's model in transformers; no weight, a norm's neither, is what another is."""
    hf = EVERY[family].hf
    settings = {key: value for key, value in hf.items() if key not in ("model_type", "torch_dtype", "architectures")}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(hf["model_type"], **settings)
    )
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = next((spread for layer, spread in SPREAD.items() if layer in name), 0.15)
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) * spread + 1.0 * ("norm" in name))
    return model.float().eval()


def sizes_of(config: Any) -> dict[str, Any]:
    """The sizes in a config.json by Megatron's names."""
    if config["model_type"] == "deepseek_v3":
        fields = {name: FIELDS[name] for name in ("hidden_size", "num_layers", "num_attention_heads")}
        fields |= {"ffn_hidden_size": "intermediate_size", "moe_ffn_hidden_size": "moe_intermediate_size"}
        return {name: config[field] for name, field in fields.items()}
    sizes = {name: config[field] for name, field in FIELDS.items()}
    experts = config.get("num_local_experts")
    inner = "moe_ffn_hidden_size" if experts else "ffn_hidden_size"
    return sizes | {"num_moe_experts": experts, inner: config["intermediate_size"]}


def in_megatron(source: Any) -> dict[str, np.ndarray]:
    """The tensors of a Llama, Mixtral or DeepSeek by Megatron's names, laid out by hand: nothing of bridge's tables is
    used.
    """
    found = {
        "embedding.word_embeddings.weight": source.read("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": source.read("model.norm.weight"),
        "output_layer.weight": source.read("lm_head.weight"),
    }
    for layer in range(source.config["num_hidden_layers"]):
        parts = attention_of(source, f"model.layers.{layer}") | ffn_of(source, layer)
        found |= {f"decoder.layers.{layer}.{name}": array for name, array in parts.items()}
    return found


def attention_of(source: Any, hf: str) -> dict[str, np.ndarray]:
    if "kv_lora_rank" in source.config:
        named = {f"self_attention.{own}": f"self_attn.{name}" for own, name in LATENT.items()}
        named["input_layernorm.weight"] = "input_layernorm.weight"
        return {own: source.read(f"{hf}.{name}") for own, name in named.items()}
    groups, hidden = source.config["num_key_value_heads"], source.config["hidden_size"]
    qkv = [source.read(f"{hf}.self_attn.{part}_proj.weight").reshape(groups, -1, hidden) for part in "qkv"]
    return {
        "self_attention.linear_qkv.weight": np.concatenate(qkv, axis=1).reshape(-1, hidden),
        "self_attention.linear_qkv.layer_norm_weight": source.read(f"{hf}.input_layernorm.weight"),
        "self_attention.linear_proj.weight": source.read(f"{hf}.self_attn.o_proj.weight"),
    }


def ffn_of(source: Any, layer: int) -> dict[str, np.ndarray]:
    hf, config = f"model.layers.{layer}", source.config
    norm = source.read(f"{hf}.post_attention_layernorm.weight")
    experts = config.get("num_local_experts") or config.get("n_routed_experts")
    if not experts or layer < config.get("first_k_dense_replace", 0):
        mlp = mlp_of(source, "mlp", *(f"{hf}.mlp.{part}_proj" for part in ("gate", "up", "down")))
        return {"mlp.linear_fc1.layer_norm_weight": norm} | mlp
    mixtral = "num_local_experts" in config
    block = "block_sparse_moe" if mixtral else "mlp"
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {"pre_mlp_layernorm.weight": norm, "mlp.router.weight": source.read(f"{hf}.{block}.gate.weight")}
    for expert in range(experts):
        of_expert = (f"{hf}.{block}.experts.{expert}.{part}" for part in parts)
        found |= mlp_of(source, f"mlp.experts.local_experts.{expert}", *of_expert)
    if not mixtral:
        found["mlp.router.expert_bias"] = source.read(f"{hf}.mlp.gate.e_score_correction_bias")
        shared = (f"{hf}.mlp.shared_experts.{part}" for part in parts)
        found |= mlp_of(source, "mlp.shared_experts", *shared)
    return found


def mlp_of(source: Any, here: str, gate: str, up: str, down: str) -> dict[str, np.ndarray]:
    both = np.concatenate([source.read(f"{name}.weight") for name in (gate, up)])
    return {f"{here}.linear_fc1.weight": both, f"{here}.linear_fc2.weight": source.read(f"{down}.weight")}
