"""A config with one entry changed: what is written computes what transformers does, or the entry is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import bridge
from bridge.core.errors import BridgeError
from bridge.tables.dialects.dialect import load_dialect
from tests.covering import grid
from tests.models import megatron_families, torchtitan_families
from tests.models.changed_configs import changed, changes, rewrite, switches, table_of
from tests.oracles import megatron_oracle, torchtitan_oracle

CLOSE = 1e-4  # float32, logits of about five
SEQUENCE = 72
# Of each architecture one; those with windows and soft caps of Megatron-Bridge's own classes are not run here.
MEGATRON = ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3-moe", "nemotron", "gpt", "deepseek",
            "glm4-moe", "gpt_oss", "starcoder2", "gemma2", "gemma3")  # fmt: skip
OF_BRIDGE = ("gemma2", "gemma3")


def config_of(family: str) -> dict[str, Any]:
    return megatron_families.EVERY[family].hf


def architecture(family: str) -> str:
    return str(config_of(family)["architectures"][0])


def has(family: str, change: str) -> bool:
    return change in changes(architecture(family))


def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, megatron_families.VOCAB, (2, SEQUENCE))


def make(config: dict[str, Any], change: str, directory: Path) -> None:
    """Save a model of the changed config; rows that it has or lacks follow the config."""
    name = str(config["architectures"][0])
    given = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    plain = transformers.AutoConfig.for_model(config["model_type"], **given).to_dict() | config
    entries = changed(name, plain, change)
    parts = {field: value for field, value in entries.items() if field in switches(table_of(name))}
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(config["model_type"], **given | parts))
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.15 + (tensor == 1).all())
    model.save_pretrained(directory)
    rewrite(directory, entries)


def theirs(directory: Path) -> np.ndarray | None:
    """What transformers answers; None if its own class refuses the config."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    except Exception as error:
        assert "validat" in repr(error).lower(), error
        return None
    try:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(ids())).logits)
    except RuntimeError as error:  # sizes that its code cannot compute with
        assert re.search("size of tensor|out of range|shape", str(error)), error
        return None


def convert(directory: Path, target: str, out: Path, change: str, **options: Any) -> bool:
    """Whether it is written; else it was refused by the entry's name."""
    try:
        bridge.convert(directory, target, out=out, verify=False, **options)
    except BridgeError as error:
        word = "rope" if change.startswith("rope:") else "bias" if change.endswith("_bias") else change
        assert word in str(error), error  # of a bias the tensors are named
        assert not out.exists()
        return False
    return True


def test_every_architecture_of_a_target_is_swept() -> None:
    assert {architecture(family) for family in MEGATRON} == load_dialect("megatron").architectures.keys()
    assert {config["architectures"][0] for config in TITAN.values()} == load_dialect("torchtitan").architectures.keys()


TITAN = {"llama3": torchtitan_families.LLAMA, "qwen3": torchtitan_families.QWEN3,
         "qwen3-moe": torchtitan_families.QWEN3_MOE, "deepseek_v3": torchtitan_families.DEEPSEEK,
         "gpt_oss": torchtitan_families.GPT_OSS, "llama4": torchtitan_families.LLAMA4,
         "mistral": {"head_dim": 10, "sliding_window": None} | torchtitan_families.LLAMA | {
             "architectures": ["MistralForCausalLM"], "model_type": "mistral"}}  # fmt: skip
# What the tiny models of torchtitan's code have in one way: which layers have experts, a window or biases; the width of
# llama4's experts, which follows from the number that a token is sent to. A load of other tensors fails.
AS_IT_IS = {"qwen3-moe": ("decoder_sparse_step", "mlp_only_layers"), "deepseek_v3": ("first_k_dense_replace",),
            "gpt_oss": ("attention_bias", "layer_types"),
            "llama4": ("interleave_moe_layer_step", "moe_layers", "num_experts_per_tok")}  # fmt: skip
EVERY = sorted({change for family in MEGATRON for change in changes(architecture(family))})
TITANS = sorted({change for config in TITAN.values() for change in changes(config["architectures"][0])})


@grid({"family": MEGATRON, "change": EVERY}, valid=lambda f, c: has(f, c) and f not in OF_BRIDGE)
def test_megatron_core_computes_a_changed_config_or_it_is_refused(family: str, change: str, tmp_path: Path) -> None:
    """The model is built of run_config.yaml alone."""
    make(config_of(family), change, tmp_path / "source")
    expected = theirs(tmp_path / "source")
    if expected is None or not convert(tmp_path / "source", "megatron", tmp_path / "out", change, spec="local"):
        return
    found = megatron_oracle.run_written(tmp_path / "out", ids())
    np.testing.assert_allclose(found, expected, atol=CLOSE * np.abs(expected).max(), rtol=0)


def is_swept(family: str, change: str) -> bool:
    return change in changes(TITAN[family]["architectures"][0]) and change not in AS_IT_IS.get(family, ())


@grid({"family": list(TITAN), "change": TITANS}, valid=is_swept)
def test_torchtitan_computes_a_changed_config_or_it_is_refused(family: str, change: str, tmp_path: Path) -> None:
    """Its model gets the numbers that it has arguments for from the run, here from the config as transformers reads it.

    Windows are not seen: none is shorter than the prompt.
    """
    make(TITAN[family], change, tmp_path / "source")
    expected, era = theirs(tmp_path / "source"), "0.2" if family == "llama4" else "0.3"
    if expected is None or not convert(tmp_path / "source", "torchtitan", tmp_path / "out", change, era=era):
        return
    read = transformers.AutoConfig.from_pretrained(tmp_path / "source").to_dict()
    tied = family == "qwen3" and read["tie_word_embeddings"]
    model = torchtitan_oracle.family("llama3" if family == "mistral" else "qwen3-tied" if tied else family, era)
    found = replace(model, ids=ids()).load_and_run(tmp_path / "out", read)
    np.testing.assert_allclose(found, expected, atol=CLOSE * np.abs(expected).max(), rtol=0)
