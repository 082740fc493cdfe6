"""The oracles agree with each other before ours is held against them: what they answer, transformers answers too, from
weights that their own mappings rename.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from tests.covering import grid
from tests.models.megatron_families import EVERY, FAMILIES, PADDED, VOCAB
from tests.models.torchtitan_families import CONFIGS
from tests.oracles import megatron_oracle, meta_oracle, torchtitan_oracle

pytestmark = pytest.mark.slow  # each asks processes, which import for ten seconds
CLOSE = 1e-4  # float32, logits about one
# Megatron-Bridge trains: how it balances and moves tokens is not the model. Its squared ReLU is a function of its own.
NOT_THE_MODEL = {"moe_router_load_balancing_type", "moe_token_dispatcher_type"}
OWN_FUNCTION = {"nemotron": {"activation_func"}}


def answer(state: dict[str, np.ndarray], config: dict[str, Any], ids: np.ndarray, scratch: Path) -> np.ndarray:
    """Logits of transformers, loaded from a checkpoint in which nothing is missing and nothing left over."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "config.json").write_text(json.dumps(config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        scratch, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return np.asarray(model.eval()(torch.from_numpy(ids)).logits)


def gpt_by_hand(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GPT-2's names; Megatron-Bridge has none. A group of linear_qkv is a head's query, key and value."""
    heads, size, renamed = 6, 10, {}
    simple = {
        "embedding.word_embeddings.weight": "wte.weight",
        "embedding.position_embeddings.weight": "wpe.weight",
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "decoder.final_layernorm": "ln_f",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
        "decoder.layers": "h",
    }
    for key, array in state.items():
        if "linear_qkv" in key:
            grouped = array.reshape(heads, 3, size, -1)
            array = np.moveaxis(grouped, 1, 0).reshape(array.shape)  # every query, every key, every value
        if "linear" in key and key.endswith("weight"):
            array = array.T
        name = "transformer." + key
        for native, hf in simple.items():
            name = name.replace(native, hf)
        renamed[name] = array[:VOCAB] if key.endswith("word_embeddings.weight") else array
    return renamed


@pytest.mark.parametrize("name", [name for name in EVERY if name != "starcoder2"])
def test_megatron_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    made = megatron_oracle.family(name)
    state = gpt_by_hand(made.state) if name == "gpt" else megatron_oracle.bridged(name)
    assert made.state["embedding.word_embeddings.weight"].shape[0] == PADDED
    assert np.abs(answer(state, made.config_hf, made.ids, tmp_path) - made.logits).max() < CLOSE


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt"])
def test_megatron_bridge_derives_the_same_model(name: str) -> None:
    differing = set(megatron_oracle.bridge_differs(name))
    assert differing <= NOT_THE_MODEL | OWN_FUNCTION.get(name, set())


@grid({"name": ["llama", "qwen3-moe"], "layers": ["stacked", "single", "singleton"]})
def test_megatron_loads_what_it_saved(name: str, layers: str, tmp_path: Path) -> None:
    made = megatron_oracle.family(name)
    made.save(tmp_path, "nemo2", layers=layers, optimizer=True)
    found = megatron_oracle.load_and_run(tmp_path / "weights", name, "module.", layers)
    assert np.array_equal(found, made.logits)


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "mixtral-grouped", "gpt"])
def test_megatron_loads_what_two_ranks_saved(name: str, tmp_path: Path) -> None:
    made = megatron_oracle.family(name)
    directory = made.save(tmp_path, "megatron-lm", tp=2) / "iter_0000100"
    assert list(directory.glob("__1_*.distcp"))
    assert np.array_equal(megatron_oracle.load_and_run(directory, name), made.logits)


def test_older_state_dicts_hold_streams(tmp_path: Path) -> None:
    made = megatron_oracle.family("llama")
    directory = made.save(tmp_path, "megatron-lm-legacy", streams=True)
    state = torch.load(directory / "iter_0000100/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    assert state["decoder.layers.2.mlp.linear_fc1._extra_state"].getvalue() == b"recipe"


def test_megatron_refuses_a_directory_with_a_tensor_missing(tmp_path: Path) -> None:
    made = megatron_oracle.family("llama")
    directory = made.save(tmp_path, "megatron-lm") / "iter_0000100"
    with pytest.raises(CheckpointException, match="q_layernorm"):
        megatron_oracle.load_and_run(directory, "qwen3")


def test_ranks_of_a_nemo_archive_are_the_whole_cut(tmp_path: Path) -> None:
    made = megatron_oracle.family("qwen2")
    with tarfile.open(made.save(tmp_path, "nemo1", tp=2)) as archive:
        archive.extractall(tmp_path, filter="data")
    parts = [torch.load(tmp_path / f"mp_rank_0{rank}/model_weights.ckpt") for rank in (0, 1)]
    whole = {f"model.{key}": torch.from_numpy(array) for key, array in made.native().items()}
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    axes = {"linear_proj.weight": 1, "linear_fc2.weight": 1}
    for key, tensor in whole.items():
        halves = [part[key] for part in parts]
        if "layer_norm" in key or "layernorm" in key:
            assert all(torch.equal(half, tensor) for half in halves)
        elif key.endswith("linear_fc1.weight"):  # each rank holds half of the gate, then half of up
            pairs = [half.chunk(2) for half in halves]
            assert torch.equal(torch.cat([pair[i] for i in (0, 1) for pair in pairs]), tensor)
        else:
            axis = next((axis for end, axis in axes.items() if key.endswith(end)), 0)
            assert torch.equal(torch.cat(halves, axis), tensor)


@pytest.mark.product  # tests of sources read every kind
@pytest.mark.parametrize("kind", megatron_oracle.KINDS)
def test_every_kind_is_written(kind: str, tmp_path: Path) -> None:
    made = megatron_oracle.family("gemma")
    assert made.save(tmp_path, kind, dtype="bfloat16").exists()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_megatron_stores_what_modelopt_holds(name: str, tmp_path: Path) -> None:
    """One amax a tensor, of shape (1,) in the file; experts are numbered there under another name."""
    import torch.distributed.checkpoint as dcp

    held = megatron_oracle.quantized(tmp_path, name)
    stored = {key.replace("local_experts", "experts"): torch.empty(1) for key in held}
    dcp.load(stored, storage_reader=dcp.FileSystemReader(tmp_path / "iter_0000100"), no_dist=True)
    assert all(stored[key.replace("local_experts", "experts")] == torch.from_numpy(amax) for key, amax in held.items())
    weight = megatron_oracle.family(name).state["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert held["decoder.layers.1.self_attention.linear_qkv.weight_quantizer._amax"] == np.abs(weight).max()


@pytest.mark.parametrize(("name", "era"), torchtitan_oracle.MODELS)
def test_torchtitan_answers_as_transformers_does(name: str, era: str, tmp_path: Path) -> None:
    made = torchtitan_oracle.family(name, era)
    assert np.abs(answer(made.hf, made.config_hf, made.ids, tmp_path) - made.logits).max() < CLOSE


@grid({"name": list(CONFIGS), "era": torchtitan_oracle.ERAS})
def test_torchtitan_comes_back(name: str, era: str, tmp_path: Path) -> None:
    """Qwen3's router correction has no Hugging Face name: its adapter drops it."""
    import torch.distributed.checkpoint as dcp

    made = torchtitan_oracle.family(name, era)
    back = made.from_hf(made.hf)
    assert {key for key in made.native if "expert_bias" not in key or name != "qwen3-moe"} == back.keys()
    assert all(np.array_equal(array, made.native[key]) for key, array in back.items())
    loaded = {key: torch.empty(array.shape) for key, array in made.native.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(made.save(tmp_path, training=True)), no_dist=True)
    assert all(np.array_equal(tensor.numpy(), made.native[key]) for key, tensor in loaded.items())


@grid({"shards": [1, 2], "version": ["2", "3.1"]})
def test_shards_of_meta_convert_to_the_same_model(shards: int, version: str, tmp_path: Path) -> None:
    made = meta_oracle.family()
    found = meta_oracle.converted(meta_oracle.save(tmp_path, shards, version), shards, version)
    assert found.keys() == made.hf.keys()
    assert all(np.array_equal(array, made.hf[name]) for name, array in found.items())
