"""Schemes whose inputs are quantized when the model runs: which targets hold them, and why the others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import BridgeError
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from tests.oracles import export_oracle

SCHEMES = ("int8_pc_pt", "fp8_block_dynamic", "w4a8_fp8", "w4a8_int8", "ct:W3A8", "mxfp4")
REFUSALS = [
    ("int8_pc_pt", "trt", "constant scales, not per token"),
    ("w4a8_fp8", "trt", "constant scales, not per token"),
    ("fp8_block_dynamic", "trt", "no op that quantizes activations to float8_e4m3fn in blocks of 128"),
    ("mxfp4", "trt", "no op that quantizes activations to float4_e2m1fn in blocks of 32 under float8_e8m0fnu"),
    ("fp8_block_dynamic", "trtllm", "no TensorRT-LLM up to 1.2 is told of inputs in groups"),
    *((scheme, "trtllm", "up to 1.2 has no such format") for scheme in ("int8_pc_pt", "w4a8_fp8", "mxfp4")),
    *((scheme, "ort", "quantizes weights only") for scheme in SCHEMES),
]


@pytest.fixture(scope="module")
def source() -> Path:
    return export_oracle.source("llama", "bf16")


@pytest.mark.parametrize(("scheme", "target", "words"), REFUSALS)
def test_a_target_says_why_it_does_not_hold_a_scheme(source: Path, scheme: str, target: str, words: str) -> None:
    options: dict[str, Any] = {"custom_ops": True} if target == "trt" else {}
    with pytest.raises(BridgeError, match=words):
        bridge.plan(source, target, scheme, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_they_need_no_calibration_and_vllm_loads_them(source: Path, scheme: str) -> None:
    plan = bridge.plan(source, "hf", scheme, runtime="vllm")
    assert verdict(load_runtime("vllm"), plan).how == "run"
    assert not any(output.part == "input_scale" for output in plan.outputs)


def test_a_kernel_wants_rows_as_the_program_holds_them(tmp_path: Path) -> None:
    """vLLM's for W4A8 takes multiples of 128 rows: of q, k and v together, and of down_proj alone."""
    import transformers

    def said(**dims: int) -> str:
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64} | dims
        config = transformers.LlamaConfig(
            vocab_size=64, num_hidden_layers=1, num_key_value_heads=1, dtype="bfloat16", **sizes
        )
        out = tmp_path / "-".join(map(str, sizes.values()))
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(out)
        plan = bridge.plan(out, "hf", "w4a8_fp8", format="compressed-tensors")
        return verdict(load_runtime("vllm"), plan).why_not

    assert said() == ""  # q, k, v: 128 + 64 + 64
    why = said(head_dim=32, num_attention_heads=4)
    assert "k_proj" in why and "out = 192 as it is held is not a multiple of 128" in why
