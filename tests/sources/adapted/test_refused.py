"""What cannot be merged or kept is refused before work starts, in one message that says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import BridgeError, SourceError, UsageError
from bridge.sources.opening import open_source
from tests.models.tiny_adapters import MODEL, factors, write_adapter

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def changed(**tensors: Any) -> dict[str, Any]:
    """The factors with some of the first layer's replaced; None leaves one out."""
    state = factors()
    for name, value in tensors.items():
        key = f"{LAYER}.{name}.weight"
        state.pop(key) if value is None else state.update({key: value})
    return state


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "ia3": ({"peft_type": "IA3"}, "an adapter of type IA3, not LoRA"),
    "prompt": ({"peft_type": "PROMPT_TUNING"}, "an adapter of type PROMPT_TUNING, not LoRA"),
    "adalora": ({"peft_type": "ADALORA"}, "an adapter of type ADALORA, not LoRA"),
    "no type": ({"peft_type": None}, "an adapter of type unknown, not LoRA"),
    "rank 0": ({"r": 0}, "r=0: a rank is 1 or more"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": -1}}, "rank_pattern[q_proj]=-1: a rank is 1 or more"),
    "no expression": ({"alpha_pattern": {"q_proj(": 2}}, "not a regular expression"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha='8': expected a number"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changed the base"),
    "activated": ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    "newer peft": ({"use_new_thing": True}, "use_new_thing, which no peft up to 0.21 writes"),
    "dora without magnitudes": ({"use_dora": True}, "use_dora is True, and the adapter has no lora_magnitude_vector"),
    "other rank": ({"r": 8}, "A (4, 128) and B (256, 4) do not fit a weight (256, 128) of rank 8"),
    "no base": ({"base_model_name_or_path": None}, "does not name its base; give base= (--base)"),
    "lost base": ({"base_model_name_or_path": "./nowhere"}, "its base './nowhere', which adapter_config.json names"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_no_plain_lora_is_refused(case: str, tmp_path: Path) -> None:
    config, message = CONFIGS[case]
    adapter = write_adapter(tmp_path / "adapter", config)
    with pytest.raises(SourceError, match="adapter") as raised:
        open_source(adapter)
    assert message in str(raised.value)


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": (
        changed(lora_A=np.zeros((4, 60), np.float32)),
        "model.layers.0.self_attn.q_proj: A (4, 60) and B (256, 4) do not fit a weight (256, 128) of rank 4",
    ),
    "a module the base lacks": (
        {f"{LAYER}_other.{name}.weight": np.zeros((4, 4), np.float32) for name in ("lora_A", "lora_B")},
        "self_attn.q_proj_other: the base has no such module; is it the adapter of another base?",
    ),
    "one factor": (changed(lora_B=None), "model.layers.0.self_attn.q_proj: the adapter lacks lora_B.weight"),
    "nan": (changed(lora_B=np.full((256, 4), np.nan, np.float32)), "q_proj.lora_B.weight: NaN or infinite"),
    "infinite": (changed(lora_A=np.full((4, 128), np.inf, np.float32)), "q_proj.lora_A.weight: NaN or infinite"),
    "integers": (changed(lora_A=np.zeros((4, 128), np.int32)), "dtype int32; expected float32"),
    "other names": ({"q_proj.lora_A.weight": np.zeros((4, 4), np.float32)}, "begin with 'base_model.model.'"),
    "a tensor of another size": (
        {**factors(), "base_model.model.lm_head.weight": np.zeros((1600, 128), np.float32)},
        "lm_head.weight: the adapter has (1600, 128), and the base (1536, 128); a changed vocabulary needs a base",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_tensors_that_do_not_fit_the_base_are_refused(case: str, tmp_path: Path) -> None:
    state, message = STATES[case]
    with pytest.raises(SourceError) as raised:
        open_source(write_adapter(tmp_path / "adapter", None, state))
    assert message in str(raised.value)


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"adapter_model.safetensors or adapter_model.bin is missing"):
        open_source(adapter)


def test_a_quantized_base_is_refused_for_merging_alone(tmp_path: Path) -> None:
    bridge.convert(MODEL, "hf", "int8_wo", tmp_path / "int8", verify=False)
    adapter = write_adapter(tmp_path / "adapter")
    with pytest.raises(SourceError, match=r"keep the adapter apart .* or dequantize the base first"):
        open_source(adapter, base=tmp_path / "int8")
    assert open_source(adapter, base=tmp_path / "int8", adapter="keep").quantized


def test_two_adapters_are_refused(tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "first"), write_adapter(tmp_path / "second")
    with pytest.raises(SourceError, match="has an adapter, too; give the plain base"):
        open_source(second, base=first)


def test_a_tied_tensor_is_refused(tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(MODEL, tied)
    text = (tied / "config.json").read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    (tied / "config.json").write_text(text)
    from safetensors.numpy import load_file, save_file

    state = load_file(MODEL / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "lm_head.weight"}, tied / "model.safetensors")
    head = {
        f"base_model.model.lm_head.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in (("lora_A", (4, 128)), ("lora_B", (1536, 4)))
    }
    with pytest.raises(SourceError, match=r"is tied to model.embed_tokens.weight: a merge would change both"):
        open_source(write_adapter(tmp_path / "adapter", None, head), base=tied)


@pytest.mark.parametrize("given", [{"base": str(MODEL)}, {"adapter": "merge"}, {"adapter": "keep"}])
def test_arguments_for_adapters_are_refused_with_a_plain_model(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"are for an adapter, which .*tiny-llama is not"):
        open_source(MODEL, **given)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"adapter='stack' .*known: keep, merge"):
        open_source(write_adapter(tmp_path / "adapter"), adapter="stack")


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"r": 0, "init_lora_weights": "corda", "kasa_config": {"beta": 1}})
    with pytest.raises(BridgeError, match="3 problems"):
        open_source(adapter)
