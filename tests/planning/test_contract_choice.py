"""What `runtime=` chooses and refuses by the contracts, and what is told of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, UsageError
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.targets.manifest import load_manifest
from tests.planning.test_contracts import TINY


@pytest.mark.parametrize("quant", ["fp8", "int4_wo", "int8_wo", "nvfp4_wo", None])
def test_a_runtime_chooses_the_first_output_that_it_loads(quant: str | None) -> None:
    plan = bridge.plan(TINY, "vllm", quant)
    assert plan.target == "hf" and verdict(load_runtime("vllm"), plan).how != "no"
    again = bridge.plan(TINY, "hf", quant, runtime="vLLM==0.33")
    assert again.digest == plan.digest
    assert [note for note in plan.notes if note.startswith("for vLLM 0.33: --target hf --format ")]


def test_what_a_runtime_does_not_load_is_refused_before_work() -> None:
    with pytest.raises(SchemeError, match=r"`qbridge show schemes --for sglang --all`") as told:
        bridge.plan(TINY, "hf", "mxfp4_wo", runtime="sglang")
    assert "--format deepseek: loads no weights in fp4 per block of 32, e8m0 scales" in str(told.value)
    with pytest.raises(BridgeError, match="int4 per block of 128") as told:
        bridge.plan(TINY, "hf", "int4_wo", runtime="vllm", format="modelopt")
    assert "this scheme it loads from --target hf --format compressed-tensors; or from" in str(told.value)
    for name in str(told.value).rpartition("planned for this model: --quant ")[2].split(", "):
        assert bridge.plan(TINY, "hf", name, runtime="vllm", format="modelopt").quantized
    with pytest.raises(SchemeError, match="does not load --target trt; it loads --target hf"):
        bridge.plan(TINY, "trt", "fp8", runtime="vllm")
    with pytest.raises(SchemeError, match=r'a recipe keeps these matrices.* quant = "none"\); fp8_pc_pt') as told:
        bridge.plan(TINY, "hf", "fp8_block", runtime="vllm")
    assert "another format" not in str(told.value)


@pytest.mark.parametrize(("target", "scheme"), [("trtllm", "fp8"), ("hf", "int8_sq")])
def test_a_refusal_tells_the_target_of_that_name_from_the_program(target: str, scheme: str) -> None:
    with pytest.raises(SchemeError, match=r"--target trtllm without --for writes another format, .* up to 1\.2"):
        bridge.plan(TINY, target, scheme, runtime="trtllm")


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("vlm", "has no contract; did you mean 'vllm'|known: "),
        ("vllm==0.20", "no contract was written for version 0.20 of vLLM; there is one for 0.33"),
        ("vllm==latest", "a version is written vllm==0.33"),
        ("vllm==0", "no contract was written for version 0 of vLLM"),
        ("llama.cpp==b9999", "no contract was written for version b9999 of llama.cpp; there is one for b11549"),
        ("vllm>=0.33", "a version is written vllm==0.33"),
        ("vllm 0.3", "no contract was written for version 0.3 of vLLM"),
    ],
)
def test_an_unknown_program_or_version_is_refused(runtime: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bridge.plan(TINY, "hf", "fp8", runtime=runtime)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("llama.cpp==b11549", "llama.cpp"),
        ("TensorRT-LLM", "trtllm"),
        ("ONNX Runtime 1.32", "onnxruntime"),
        ("vllm==v0.33", "vllm"),
    ],
)
def test_a_program_is_known_as_bridge_prints_it(given: str, name: str) -> None:
    assert load_runtime(given).name == name


def test_a_float32_source_is_given_to_tensorrt_as_float16() -> None:
    plan = bridge.plan(TINY, "trt", "int8_wo", runtime="tensorrt-rtx")
    assert plan.options["dtype"] == "float16" and plan.notes[-1].endswith("float32 as float16 (--dtype)")
    asked = bridge.plan(TINY, "trt", "int8_wo", runtime="tensorrt-rtx", dtype="fp32")
    assert asked.options["dtype"] == "float32" and "float32 as" not in asked.notes[-1]


@pytest.mark.parametrize(("value", "dtype"), [(65519.0, "float16"), (65520.0, "bfloat16")])
def test_values_that_float16_does_not_hold_are_written_as_bfloat16(value: float, dtype: str, tmp_path: Path) -> None:
    """65519 is rounded to 65504, the largest; 65520 to infinity."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    tensors = load_file(model / "model.safetensors")
    norm = "model.layers.2.input_layernorm.weight"
    tensors[norm][3] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    bridge.convert(model, "trt", "int8_wo", tmp_path / "out", runtime="tensorrt-rtx", verify=False, progress=False)
    plan = load_manifest(tmp_path / "out").plan
    assert plan.options["dtype"] == dtype
    assert (f"{norm} has values that float16 does not hold: bfloat16 (--dtype)" in plan.notes) == (dtype == "bfloat16")


def test_an_input_beyond_float16_chooses_bfloat16_or_stops_before_writing(tmp_path: Path) -> None:
    calibration = bridge.calibrate(TINY, "int8", samples=2, sequence=16, progress=False)
    wide = dict(calibration.input_amax)
    wide["model.layers.1.mlp.down_proj"] = np.array(7e4, np.float32)
    changed = dataclasses.replace(calibration, input_amax=wide)
    options: dict[str, Any] = {"runtime": "tensorrt-rtx", "verify": False, "progress": False}
    bridge.convert(TINY, "trt", "int8", tmp_path / "given", calib=changed, **options)
    plan = load_manifest(tmp_path / "given").plan
    note = "the input of model.layers.1.mlp.down_proj reaches values that float16 does not hold: bfloat16 (--dtype)"
    assert plan.options["dtype"] == "bfloat16" and note in plan.notes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.api.conversion.calibrate", lambda job: changed)
        with pytest.raises(
            CalibrationError, match=r"down_proj reaches values that float16 does not hold; pass dtype='bf16'"
        ):
            bridge.convert(TINY, "trt", "int8", tmp_path / "made", samples=2, sequence=16, **options)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("quant", ["int4_gptq", "int4_awq", "int4_mse", "int4_wo", "w4a8_awq"])
@pytest.mark.parametrize("width", [576, 80])
def test_what_a_refusal_names_plans_for_the_model(quant: str, width: int, tmp_path: Path) -> None:
    """576 is no multiple of 128, which a block of 64 divides; 80 none of 32."""
    model = narrow(width, tmp_path)
    try:
        plan = bridge.plan(model, "hf", quant, runtime="vllm")
        assert width == 576 and not verdict(load_runtime("vllm"), plan).why_not
    except BridgeError as error:
        assert width == 80 or quant == "w4a8_awq"
        names = str(error).splitlines()[-1].removeprefix("  planned for this model: --quant ").split(", ")
        for name in names:
            assert not verdict(load_runtime("vllm"), bridge.plan(model, "hf", name, runtime="vllm")).why_not
        assert names[0] == ("int4:gptq" if width == 576 else "nvfp4_wo:gptq")


def narrow(width: int, at: Path) -> Path:
    """A Llama of zeros whose matrices all have this width."""
    layer = "model.layers.0."
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    shapes = {f"{layer}{name}.weight": (width, width) for name in names}
    shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes |= {"model.embed_tokens.weight": (32, width), "lm_head.weight": (32, width), "model.norm.weight": (width,)}
    save_arrays({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, at / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": width,
        "num_hidden_layers": 1, "num_attention_heads": width // 16, "num_key_value_heads": width // 16, "head_dim": 16,
        "vocab_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
    }  # fmt: skip
    (at / "config.json").write_text(json.dumps(config))
    return at
