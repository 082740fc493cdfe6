"""Quantized sources that cannot be carried over, and bad numbers in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import BridgeError, SourceError
from tests.models.stored_checkpoints import exported, llama, modelopt
from tests.oracles import compressed_oracle
from tests.targets.hf.test_passthrough import carry, tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "target", "options", "words"),
    [
        ("int4_awq", "hf", {"format": "compressed-tensors"}, "does not write its pre-scale"),
        ("fp8_pc_pt", "trt", {}, "not per token"),
        ("mxfp8", "trt", {}, "custom_ops"),
    ],
)
def test_what_a_target_cannot_say_is_refused_with_the_way_out(
    tmp_path: Path, scheme: str, target: str, options: dict[str, Any], words: str
) -> None:
    source = exported(modelopt(llama(), scheme), tmp_path / "source")
    with pytest.raises(BridgeError, match=words) as caught:
        bridge.plan(source, target=target, **options)
    assert "use quant='none' (--quant none) to dequantize" in str(caught.value)


@pytest.mark.parametrize("preset", ["W8A8", "W8A16"])
def test_what_unified_checkpoints_have_no_word_for_is_refused_with_the_way_out(tmp_path: Path, preset: str) -> None:
    source = compressed_oracle.compress(llama(), preset, tmp_path / "source")
    with pytest.raises(BridgeError, match="a unified checkpoint has no algorithm for weights in") as caught:
        bridge.plan(source, target="hf", format="modelopt")
    assert "use quant='none' (--quant none) to dequantize" in str(caught.value)
    assert bridge.plan(source, target="hf").options["format"] == "compressed-tensors"


def test_a_missing_input_scale_stops_the_carrying_and_not_the_dequantizing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = exported(modelopt(llama(), "fp8"), tmp_path / "source")
    state = tensors(source)
    del state["model.layers.1.mlp.up_proj.input_scale"]
    save_file(state, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match=r"model.layers.1.mlp.up_proj: the source has no scale of its input"):
        bridge.plan(source, target="hf")
    assert bridge.plan(source, target="hf", quant="none").quantized == ()


MLP = "model.layers.1.mlp.up_proj"
ATTENTION = "model.layers.0.self_attn.k_proj"
BAD = [
    ("fp8", f"{MLP}.weight", 0x7F, "row 3 holds a NaN at column 5; repair the checkpoint"),
    ("fp8", f"{MLP}.weight", 0xFF, "row 3 holds a NaN at column 5; repair the checkpoint"),
    (
        "fp8",
        f"{MLP}.weight_scale",
        float("nan"),
        "not finite and above zero, nan first; repair the checkpoint",
    ),
    ("fp8", f"{MLP}.weight_scale", 0.0, "0 first; use quant='none'"),
    ("fp8", f"{MLP}.weight_scale", -1.0, "-1 first; repair the checkpoint"),
    ("fp8", f"{MLP}.input_scale", float("inf"), "inf first; use quant='none'"),
    ("fp8", f"{MLP}.input_scale", 0.0, "0 first; use quant='none'"),
    ("fp8", f"{ATTENTION}.k_scale", float("nan"), "nan first; use quant='none'"),
    ("fp8", f"{ATTENTION}.k_scale", -2.0, "-2 first; use quant='none'"),
    ("fp8_block", f"{MLP}.weight_scale", float("nan"), "1 scale not finite and above zero, nan first"),
    ("int4_awq", "model.layers.1.mlp.down_proj.pre_quant_scale", 0.0, "0 first; use quant='none'"),
    ("int8", f"{MLP}.weight_scale", float("inf"), "inf first; repair the checkpoint"),
    ("nvfp4_wo", f"{MLP}.weight_scale", 0x7F, "nan first; repair the checkpoint"),
    ("nvfp4_wo", f"{MLP}.weight_scale", 0x81, "1 scale not finite and above zero, -0.00195312 first"),
    ("nvfp4_wo", f"{MLP}.weight_scale_2", 0.0, "0 first"),
    ("mxfp8", f"{MLP}.weight_scale", 0xFF, "nan first; repair the checkpoint"),
]


def spoilt(source: Path, name: str, value: float) -> Path:
    """Put one bad number into a tensor, given as its bits where it has a byte each."""
    from safetensors.torch import save_file

    state = tensors(source)
    tensor = state[name]
    flat = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    flat[(3, 5) if name.endswith(".weight") else (0,) * flat.ndim] = value
    save_file(state, source / "model.safetensors", {"format": "pt"})
    return source


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name", "value", "words"), BAD)
def test_no_bad_number_of_the_source_leaves(tmp_path: Path, scheme: str, name: str, value: float, words: str) -> None:
    source = spoilt(exported(modelopt(llama(), scheme, kv=scheme == "fp8"), tmp_path / "source"), name, value)
    with pytest.raises(SourceError) as caught:
        carry(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{name}: ") and words in str(caught.value)
    assert not (tmp_path / "out").exists()
    if "quant='none'" in words:
        carry(source, tmp_path / "out", quant="none")
    if "repair" in words:
        wrong = "negative scales" if value == -1.0 else "NaN or infinity"
        with pytest.raises(SourceError, match=f"{MLP}.weight.*: holds {wrong}"):
            carry(source, tmp_path / "out", quant="none")


@pytest.mark.slow
def test_a_block_of_zeros_keeps_its_zero_scale(tmp_path: Path) -> None:
    name = f"{MLP}.weight_scale"
    source = spoilt(exported(modelopt(llama(), "nvfp4_wo"), tmp_path / "source"), name, 0)
    assert (carry(source, tmp_path / "out") / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
