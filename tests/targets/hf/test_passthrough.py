"""A quantized source into another target: carried over to the bit, dequantized, or quantized anew."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, CompressedTensorsConfig  # noqa: E402

import bridge  # noqa: E402
from bridge.core.errors import BridgeError  # noqa: E402
from bridge.sources.live_models.loading import as_tensor  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.sources_made import CONFIG, llama_shapes  # noqa: E402
from tests.models.stored_checkpoints import IDS, deepseek, exported, gpt2, llama, mixture, modelopt, ragged  # noqa: E402
from tests.oracles import compressed_oracle  # noqa: E402
from tests.oracles.export_oracle import content  # noqa: E402

UNIFIED = (
    "fp8",
    "fp8_pc_pt",
    "fp8_block",
    "int8",
    "int8_sq",
    "int8_wo",
    "int4_wo",
    "int4_awq",
    "w4a8_awq",
    "nvfp4_wo",
    "mxfp8",
    "nvfp4_awq",
    "w4a8_nvfp4_fp8",
)
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "NVFP4", "MXFP8", "MXFP4A16")


def carry(source: Path, out: Path, target: str = "hf", quant: Any = None, **options: Any) -> Path:
    assert bridge.convert(source, target=target, quant=quant, out=out, **options).passed
    return out


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, dtype and shape included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def tensors(directory: Path) -> dict[str, Any]:
    return load_file(directory / "model.safetensors")


def logits(directory: Path) -> Any:
    with torch.no_grad():
        return open_source(directory).load_model()(IDS[0]).logits


@pytest.mark.slow
@pytest.mark.parametrize("scheme", UNIFIED)
def test_a_unified_checkpoint_is_carried_over_byte_for_byte(tmp_path: Path, scheme: str) -> None:
    source = exported(modelopt(llama(), scheme, kv=scheme == "fp8"), tmp_path / "source")
    out = carry(source, tmp_path / "out")
    for name in ("model.safetensors", "hf_quant_config.json"):
        assert content(out / name) == content(source / name)
    one, other = (json.loads((d / "config.json").read_text()) for d in (source, out))
    assert one["quantization_config"] == other["quantization_config"]


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors_are_carried_over_to_the_bit(tmp_path: Path, preset: str) -> None:
    source = compressed_oracle.compress(llama(), preset, tmp_path / "source")
    before, after = tensors(source), tensors(carry(source, tmp_path / "out", format="compressed-tensors"))
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []


@pytest.mark.parametrize("preset", ["W8A16", "W4A16"])
def test_rows_that_end_within_an_int32_are_carried_over_to_the_bit(tmp_path: Path, preset: str) -> None:
    source = compressed_oracle.compress(ragged(74), preset, tmp_path / "source", channels=True)
    before, after = tensors(source), tensors(carry(source, tmp_path / "out", format="compressed-tensors"))
    assert [name for name in before if not same(before[name], after[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8_wo", "int4_awq", "nvfp4_wo"])
def test_a_unified_checkpoint_of_conv1d_is_carried_over_byte_for_byte(tmp_path: Path, scheme: str) -> None:
    source = exported(modelopt(gpt2(), scheme), tmp_path / "source")
    out = carry(source, tmp_path / "out")
    for name in ("model.safetensors", "hf_quant_config.json"):
        assert content(out / name) == content(source / name)


@pytest.mark.usefixtures("graphs_once")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_wo", pytest.param("int8_wo", marks=pytest.mark.product), "fp8_block"])
def test_onnx_holds_the_codes_of_conv1d_turned_back(tmp_path: Path, scheme: str) -> None:
    source = exported(modelopt(gpt2(torch.float32), scheme), tmp_path / "source")
    before, after = tensors(source), tensors(carry(source, tmp_path / "out", target="trt", verify=False))
    for module in ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj"):
        codes, theirs = after[f"{module}.weight"], before[f"{module}.weight"]
        if scheme == "int4_wo":
            theirs = torch.stack([theirs & 15, theirs >> 4], 1).flatten(0, 1)  # out, in
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)  # in, out
        assert same(codes, theirs.T.contiguous())
        scale = before[f"{module}.weight_scale"]
        if scheme == "fp8_block":
            scale = scale[:, 0, :, 0].repeat_interleave(128, 0)
        assert torch.equal(after[f"{module}.weight_scale"], scale.T)


@grid(
    {
        "dtype": [torch.bfloat16, torch.float32],
        "scheme": ["fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_wo", "int4_wo", "nvfp4_wo", "mxfp8"],
    }
)
def test_transformers_reads_a_unified_checkpoint_in_the_words_of_compressed_tensors(
    tmp_path: Path, scheme: str, dtype: Any
) -> None:
    source = exported(modelopt(llama(dtype), scheme), tmp_path / "source")
    out = carry(source, tmp_path / "out", format="compressed-tensors")
    plain = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out, quantization_config=plain)(IDS[0]).logits
    ours = logits(source)
    # NVFP4's scale is inverted, which rounds; compressed-tensors rounds FP4 to bfloat16
    assert float((theirs - ours).float().norm() / ours.float().norm()) <= (1e-2 if "fp4" in scheme else 0)


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "W4A16", "NVFP4A16", "NVFP4", "MXFP8", "MXFP4A16"])
def test_the_unified_checkpoint_of_compressed_tensors_stands_for_the_same_weights(tmp_path: Path, preset: str) -> None:
    source = compressed_oracle.compress(llama(), preset, tmp_path / "source")
    one, other = open_source(source), open_source(carry(source, tmp_path / "out"))
    assert other.quantized.tensors.stored.keys() == one.quantized.tensors.stored.keys()
    for name, spec in one.specs.items():
        before, after = (as_tensor(s.read(name).copy(), spec.dtype) for s in (one, other))
        assert torch.allclose(before, after, rtol=2**-8 if "NVFP4" in preset else 0, atol=0), name


@pytest.mark.parametrize("preset", ["W4A16", "NVFP4A16"])
def test_four_bit_codes_are_repacked(tmp_path: Path, preset: str) -> None:
    source = compressed_oracle.compress(llama(), preset, tmp_path / "source")
    before, after = tensors(source), tensors(carry(source, tmp_path / "out"))
    module = "model.layers.1.mlp.down_proj"
    packed, codes = before[f"{module}.weight_packed"], after[f"{module}.weight"]
    if preset == "NVFP4A16":
        assert torch.equal(packed, codes)
        assert torch.equal(after[f"{module}.weight_scale_2"], (1 / before[f"{module}.weight_global_scale"]).reshape(()))
        return
    theirs = torch.stack([(packed >> 4 * at & 15) - 8 for at in range(8)], -1).flatten(1)  # out, in
    ours = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).to(torch.int32)  # out, in
    assert torch.equal(torch.where(ours > 7, ours - 16, ours), theirs)


def test_deepseek_blocks_become_those_of_a_unified_checkpoint(tmp_path: Path) -> None:
    shapes = llama_shapes(CONFIG)
    plain = {name: shape for name, shape in shapes.items() if not name.endswith("_proj.weight")}
    quantized = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name not in plain}
    made = deepseek(tmp_path / "source", quantized, plain=plain, config=CONFIG)
    after = tensors(carry(tmp_path / "source", tmp_path / "out"))
    for module, (codes, scale) in made.items():
        assert same(after[f"{module}.weight"], codes)
        assert same(after[f"{module}.weight_scale"], scale[:, None, :, None].contiguous())


GRAPHS = ["fp8", "nvfp4_wo"]
GRAPHS += [pytest.param(name, marks=pytest.mark.product) for name in ("fp8_block", "int8_sq", "int8_wo")]


@pytest.mark.usefixtures("graphs_once")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_awq", *GRAPHS])
def test_onnx_holds_the_codes_of_a_unified_checkpoint(tmp_path: Path, scheme: str) -> None:
    source = exported(modelopt(llama(torch.float32), scheme), tmp_path / "source")
    out = carry(source, tmp_path / "out", target="trt", opset=23)  # the least for FP4: one graph for all
    before, after, module = tensors(source), tensors(out), "model.layers.0.self_attn.o_proj"
    codes, theirs = after[f"{module}.weight"], before[f"{module}.weight"]
    if "4" in scheme:  # two of `out` to a byte, or two of `in` (FP4); here always two along the last axis
        axis = -1 if scheme == "nvfp4_wo" else 1
        theirs = torch.stack([theirs & 15, theirs >> 4], axis).flatten(*((1, 2) if axis < 0 else (0, 1)))  # out, in
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)  # in, out
    assert same(codes, theirs.T.contiguous())
    for part in ("input_scale", "pre_quant_scale", "weight_scale_2"):
        assert (f"{module}.{part}" in after) == (f"{module}.{part}" in before)
        if f"{module}.{part}" in before:
            assert torch.equal(after[f"{module}.{part}"].reshape(-1), before[f"{module}.{part}"].reshape(-1))


@pytest.mark.slow
def test_kv_scales_are_carried_over(tmp_path: Path) -> None:
    source = exported(modelopt(llama(), "fp8", kv=True), tmp_path / "source")
    before, after = tensors(source), tensors(carry(source, tmp_path / "out", format="compressed-tensors"))
    for at in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        for letter in "kv":
            scale = before[f"{at}.{letter}_proj.{letter}_scale"].reshape(1)
            assert same(after[f"{at}.{letter}_scale"], scale.to(torch.bfloat16))


@pytest.mark.slow
def test_none_writes_the_weights_that_the_codes_stand_for(tmp_path: Path) -> None:
    source = exported(modelopt(llama(), "nvfp4_wo"), tmp_path / "source")
    out = carry(source, tmp_path / "out", quant="none")
    opened = open_source(source)
    for name, tensor in tensors(out).items():
        assert same(tensor, as_tensor(opened.read(name).copy(), opened.specs[name].dtype)), name
    assert open_source(out).quantized is None
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS[0]).logits, logits(source))


@pytest.mark.slow
def test_a_scheme_quantizes_the_dequantized_weights_anew(tmp_path: Path) -> None:
    source = exported(modelopt(llama(), "fp8"), tmp_path / "source")
    plain = carry(source, tmp_path / "plain", quant="none")
    one, other = (tensors(carry(m, tmp_path / f"{m.name}-int4", quant="int4_wo")) for m in (source, plain))
    assert one.keys() == other.keys()
    assert all(same(one[name], other[name]) for name in one)
    notes = bridge.plan(source, target="hf", quant="int4_wo").notes
    assert "14 weights of the source are quantized: they are dequantized first" in notes


def test_the_plan_of_a_quantized_source_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = exported(modelopt(llama(), "fp8"), tmp_path / "source")
    from bridge.core.formats.safetensors import SafetensorsFile

    read, seen = SafetensorsFile.read, []

    def watched(self: SafetensorsFile, name: str) -> np.ndarray:
        seen.append(self.specs[name].size)
        return read(self, name)

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    monkeypatch.setattr(SafetensorsFile, "read_rows", None)
    plan = bridge.plan(source, target="hf")
    assert plan.scheme == "stored"
    assert all(o.expression == f"as stored: {o.spec.name}" for step in plan.quantized for o in step.outputs)
    assert max(seen, default=0) <= 2
    assert bridge.plan(source, target="hf").digest == plan.digest


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("scheme", ["int8_wo", "fp8_pc_pt", "int8"])
def test_ranks_of_tensorrt_llm_hold_what_modelopt_exports_to_them(tmp_path: Path, scheme: str, tp: int) -> None:
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    made = modelopt(llama(), scheme)
    with contextlib.redirect_stdout(io.StringIO()):
        export_tensorrt_llm_checkpoint(
            copy.deepcopy(made), "llama", torch.bfloat16, str(tmp_path / "theirs"), inference_tensor_parallel=tp
        )
    out = carry(exported(made, tmp_path / "source"), tmp_path / "out", target="trtllm", tp=tp)
    for rank in range(tp):
        theirs, ours = (load_file(root / f"rank{rank}.safetensors") for root in (tmp_path / "theirs", out))
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not same(ours[name], theirs[name])] == []


def test_scales_of_one_matrix_each_do_not_fit_under_one(tmp_path: Path) -> None:
    source = exported(modelopt(llama(), "fp8"), tmp_path / "source")
    with pytest.raises(BridgeError, match="whose weights have different scales, under one scale") as caught:
        bridge.plan(source, target="trtllm")
    assert "use quant='none' (--quant none) to dequantize" in str(caught.value)


@pytest.mark.slow
def test_carrying_imports_no_framework(tmp_path: Path) -> None:
    source = compressed_oracle.compress(llama(), "NVFP4A16", tmp_path / "source")
    code = (
        "import sys, bridge\n"
        "bridge.convert(sys.argv[1], target='hf', out=sys.argv[2], verify=False)\n"
        "bridge.convert(sys.argv[1], target='hf', quant='none', out=sys.argv[2] + '-plain', verify=False)\n"
        "print(*[m for m in ('torch', 'transformers', 'ml_dtypes', 'compressed_tensors') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.slow
def test_experts_are_carried_over_byte_for_byte(tmp_path: Path) -> None:
    source = exported(modelopt(mixture(), "fp8"), tmp_path / "source")
    out = carry(source, tmp_path / "out")
    for name in ("model.safetensors", "hf_quant_config.json", "config.json"):
        assert content(out / name) == content(source / name)


@pytest.mark.slow
def test_mixed_precision_is_carried_over_byte_for_byte(tmp_path: Path) -> None:
    integers = [
        {"quantizer_name": "*down_proj.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
        {"quantizer_name": "*down_proj.input_quantizer", "enable": False},
    ]
    source = exported(modelopt(llama(), "fp8", more=integers), tmp_path / "source")
    assert '"MIXED_PRECISION"' in (source / "hf_quant_config.json").read_text()
    out = carry(source, tmp_path / "out")
    for name in ("model.safetensors", "hf_quant_config.json", "config.json"):
        assert content(out / name) == content(source / name)
