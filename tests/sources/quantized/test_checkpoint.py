"""Quantized checkpoints: what others wrote is read as others read it; what is damaged is named, all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import PlanError, SourceError
from bridge.sources.opening import open_source
from bridge.sources.quantized.fields import unknown

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file as torch_load  # noqa: E402
from safetensors.torch import save_file as torch_save  # noqa: E402

from tests.blocks import ROOT  # noqa: E402
from tests.models.stored_checkpoints import IDS, deepseek, exported, gpt2, llama, modelopt, ragged  # noqa: E402
from tests.oracles import compressed_oracle  # noqa: E402

SLOW = [pytest.mark.slow]
NIGHTLY = [*SLOW, pytest.mark.product]
PRESETS = (
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "W8A8",
    "W8A16",
    "W4A16",
    "W4A16_ASYM",
    "W4A8",
    "NVFP4A16",
    "NVFP4",
    "MXFP8",
    "MXFP4A16",
)


def values(source: Any, name: str) -> Any:
    from bridge.sources.live_models.loading import as_tensor

    return as_tensor(source.read(name).copy(), source.specs[name].dtype)


def refusal(model: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [(preset, torch.bfloat16) for preset in PRESETS]
    + [pytest.param(preset, torch.float32, marks=NIGHTLY if preset != "W4A16" else SLOW) for preset in PRESETS]
    # FP4 is rounded to bfloat16 first there
    + [
        pytest.param(preset, torch.float16, marks=NIGHTLY if preset != "W8A16" else SLOW)
        for preset in PRESETS
        if "FP4" not in preset
    ],
)
def test_compressed_tensors_reads_as_transformers_decompresses(tmp_path: Path, preset: str, dtype: Any) -> None:
    root = compressed_oracle.compress(llama(dtype), preset, tmp_path / "model")
    source, theirs = open_source(root), compressed_oracle.decompressed(root)
    assert source.specs.keys() == theirs.keys()
    for name, tensor in theirs.items():
        ours = values(source, name)
        assert ours.dtype == dtype
        if "FP4" in preset:  # compressed-tensors rounds it to bfloat16, whatever the dtype of the model
            ours, tensor = ours.to(torch.bfloat16), tensor.to(torch.bfloat16)
        assert torch.equal(ours, tensor), name
    assert "quantization_config" not in source.config


EXTENTS = (1, 2, 127, 128, 129, 255, 256, 300)


@pytest.mark.parametrize("kind", ["float32", "e8m0"])
def test_deepseek_blocks_are_dequantized_at_every_ragged_shape(tmp_path: Path, kind: str) -> None:
    shapes = {f"layers.{a}.{b}": (a, b) for a in EXTENTS for b in EXTENTS}
    made = deepseek(tmp_path / "model", shapes, kind)
    source = open_source(tmp_path / "model")
    for module, (codes, scale) in made.items():
        out, in_ = codes.shape
        wide = scale.float().repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :in_]
        want = (codes.float() * wide).to(torch.bfloat16)
        assert torch.equal(values(source, f"{module}.weight"), want), module


def test_a_dtype_of_experts_beside_the_section_is_one_of_the_section(tmp_path: Path) -> None:
    """As transformers moves DeepSeek-V4's; one that is left over would be moved into the section that we write."""
    tiny, stored = ROOT / "examples" / "models" / "tiny-llama", tmp_path / "stored"
    bridge.convert(tiny, "hf", "fp8_block", stored, format="deepseek", progress=False, verify=False)
    own = json.loads((stored / "config.json").read_text())
    for dtype in ("fp8", "fp4"):
        (stored / "config.json").write_text(json.dumps({**own, "expert_dtype": dtype}))
        if dtype == "fp4":
            with pytest.raises(PlanError, match="expert_dtype of fp8 is not read"):
                bridge.convert(stored, "hf", "int8_wo", tmp_path / dtype, progress=False, verify=False)
            continue
        bridge.convert(stored, "hf", "fp8_block", tmp_path / dtype, format="deepseek", progress=False, verify=False)
        assert "expert_dtype" not in (tmp_path / dtype / "config.json").read_text()


@pytest.mark.parametrize("kind", ["float32", "e8m0"])
def test_scales_that_are_powers_of_two_are_copied_with_their_word(tmp_path: Path, kind: str) -> None:
    tiny, stored = ROOT / "examples" / "models" / "tiny-llama", tmp_path / "stored"
    bridge.convert(tiny, "hf", "fp8_block", stored, format="deepseek", progress=False, verify=False)
    tensors, config = torch_load(stored / "model.safetensors"), json.loads((stored / "config.json").read_text())
    scales = {name: 2.0 ** tensor.log2().ceil() for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    held = {name: scale.to(torch.float8_e8m0fnu) if kind == "e8m0" else scale for name, scale in scales.items()}
    torch_save(tensors | held, stored / "model.safetensors", {"format": "pt"})
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (stored / "config.json").write_text(json.dumps(config))
    report = bridge.convert(stored, "hf", None, tmp_path / "out", format="deepseek", progress=False)
    written = torch_load(tmp_path / "out" / "model.safetensors")
    assert report.passed and written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in (tensors | scales).items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    other = bridge.plan(stored, "hf", format="compressed-tensors")
    assert any("scale_fmt ue8m0 of quantization_config is left out" in note for note in other.notes)
    assert {o.spec.dtype for o in other.outputs if o.part == "scale"} == {"float32"}


def test_deepseek_blocks_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made = deepseek(tmp_path / "model", {"a": (256, 384), "b": (128, 640)})
    source = open_source(tmp_path / "model")
    for module, (codes, scale) in made.items():
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
        assert torch.equal(values(source, f"{module}.weight"), theirs)


@pytest.mark.parametrize("rows", [(0, 1), (0, 300), (1, 2), (3, 131), (127, 129), (128, 256), (255, 300)])
def test_rows_are_rows_of_the_whole(tmp_path: Path, rows: tuple[int, int]) -> None:
    deepseek(tmp_path / "model", {"a": (300, 257)})
    source = open_source(tmp_path / "model")
    assert np.array_equal(source.read_rows("a.weight", *rows), source.read("a.weight")[slice(*rows)])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rows", [(0, 1), (3, 8), (5, 192)])
def test_rows_of_packed_codes_are_rows_of_the_whole(tmp_path: Path, preset: str, rows: tuple[int, int]) -> None:
    source = open_source(compressed_oracle.compress(llama(num_hidden_layers=1), preset, tmp_path / "model"))
    name = "model.layers.0.self_attn.k_proj.weight"
    out = np.empty((rows[1] - rows[0], 256), np.uint16)
    assert source.read_rows(name, *rows, out) is out
    assert np.array_equal(out, source.read(name)[slice(*rows)])


@pytest.mark.parametrize("scheme", ["fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_sq", "int8_wo", "int4_wo"])
def test_modelopt_checkpoints_answer_as_the_model_that_was_exported(tmp_path: Path, scheme: str) -> None:
    made = modelopt(llama(torch.float32), scheme)
    with torch.no_grad():
        want = made(IDS[0]).logits
        got = open_source(exported(made, tmp_path / "out")).load_model()(IDS[0]).logits
    # float32 sums; the scheme itself costs 1e-2 and more. ModelOpt's exporter rounds w / (amax / 127), its quantizer
    # w * (127 / amax): where calibration meets a tie, which depends on the processor's sums, one code differs.
    assert float((got - want).norm() / want.norm()) < (1e-4 if scheme.startswith("int8") else 2e-6)


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int4_wo"])
def test_weights_of_conv1d_are_turned_back(tmp_path: Path, scheme: str) -> None:
    made = modelopt(gpt2(torch.float32), scheme)
    with torch.no_grad():
        want = made(IDS[0]).logits
        source = open_source(exported(made, tmp_path / "out"))
        got = source.load_model()(IDS[0]).logits
    assert float((got - want).norm() / want.norm()) < 2e-6
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc"):
        whole = source.read(f"transformer.h.1.{name}.weight")
        assert whole.shape[0] == 256
        for a, b in ((0, 1), (3, 131), (127, 256)):
            assert np.array_equal(source.read_rows(f"transformer.h.1.{name}.weight", a, b), whole[a:b])


@pytest.mark.parametrize("name", ["c_fc", "attn.c_proj"])
def test_a_conv1d_that_modelopt_turned_and_did_not_quantize_is_named(tmp_path: Path, name: str) -> None:
    off = [{"quantizer_name": f"*{name}.*", "enable": False}]
    message = refusal(exported(modelopt(gpt2(), "fp8", more=off), tmp_path / "out"))
    assert f"{name}.weight: not quantized, and perhaps not [in, out]" in message and "2 problems" in message


# the others of a layer read a norm that takes their pre-scale, and are coded again for that
UNFOLDED = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_awq", "w4a8_awq"])
def test_prescales_beside_a_weight_are_multiplied_in(tmp_path: Path, scheme: str) -> None:
    made, want = modelopt(llama(torch.float32), scheme), {}
    for name in UNFOLDED:
        module = made.get_submodule(name)
        with torch.no_grad():
            want[name] = module.weight_quantizer(module.weight) * module.input_quantizer._pre_quant_scale
    source = open_source(exported(made, tmp_path / "out"))
    for name, weight in want.items():
        assert torch.allclose(values(source, f"{name}.weight"), weight, rtol=1e-6, atol=0)
    assert not [name for name in source.specs if name.endswith("scale")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["nvfp4_wo", "mxfp8"])
def test_modelopt_tensors_are_dequantized_as_modelopt_does(tmp_path: Path, scheme: str, dtype: Any) -> None:
    root = exported(modelopt(llama(dtype), scheme), tmp_path / "out")
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    source, stored = open_source(root), torch_load(root / "model.safetensors")
    modules = source.quantized.tensors.stored
    assert len(modules) == 14
    for module, of in modules.items():
        codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        if scheme == "mxfp8":
            theirs = MXFP8QTensor(of.spec.shape, torch.float32, codes).dequantize(scale=scale, block_sizes={-1: 32})
        else:
            theirs = NVFP4QTensor(of.spec.shape, torch.float32, codes).dequantize(
                scale=scale, double_scale=stored[f"{module}.weight_scale_2"], block_sizes={-1: 16}
            )
        assert torch.equal(values(source, f"{module}.weight"), theirs.to(dtype)), module


@pytest.mark.slow
def test_kv_scales_belong_to_their_attention_module(tmp_path: Path) -> None:
    root = exported(modelopt(llama(torch.float32), "fp8", kv=True), tmp_path / "out")
    source, stored = open_source(root), torch_load(root / "model.safetensors")
    attention = source.quantized.tensors.attention
    assert sorted(attention) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for module, scales in attention.items():
        assert float(scales["k_scale"].read()) == float(stored[f"{module}.k_proj.k_scale"])
        assert float(scales["v_scale"].read()) == float(stored[f"{module}.v_proj.v_scale"])
    assert source.quantized.kv.dtype == "float8_e4m3fn"
    plain = open_source(llama(torch.float32))
    assert source.specs.keys() == plain.specs.keys()


def test_nothing_of_the_quantization_is_carried_along(tmp_path: Path) -> None:
    source = open_source(exported(modelopt(llama(), "fp8"), tmp_path / "out"))
    assert "quantization_config" not in source.config
    assert "quantization_config" not in json.loads(source.side_files["config.json"])
    assert "hf_quant_config.json" not in source.side_files
    assert "how the source is quantized" in source.dropped["hf_quant_config.json"]


def edited(root: Path, **changes: Any) -> Path:
    """Replace tensors (None removes) of the first layer's MLP in a written checkpoint, dots as double underscores."""
    state = torch_load(root / "model.safetensors")
    for name, tensor in changes.items():
        key = "model.layers.0.mlp." + name.replace("__", ".")
        state.pop(key, None)
        state |= {key: tensor} if tensor is not None else {}
    torch_save(state, root / "model.safetensors")
    return root


def test_every_companion_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    root = compressed_oracle.compress(llama(), "FP8_DYNAMIC", tmp_path / "model")
    edited(
        root,
        up_proj__weight_scale=None,
        gate_proj__weight_scale=torch.ones(3, 1),
        down_proj__input_zero_point=torch.ones(1),
    )
    message = refusal(root)
    assert "3 problems" in message
    assert "model.layers.0.mlp.up_proj.weight_scale: missing; model.layers.0.mlp.up_proj.weight cannot be" in message
    assert "gate_proj.weight_scale: is float32 (3, 1), but the weight (640, 256) needs float32 (640, 1)" in message
    assert "model.layers.0.mlp.down_proj: asymmetric" in message


def test_negative_scales_are_not_dequantized(tmp_path: Path) -> None:
    deepseek(tmp_path / "model", {"model.layers.0.mlp.up_proj": (130, 256)})
    source = open_source(edited(tmp_path / "model", up_proj__weight_scale_inv=-torch.ones(2, 2)))
    with pytest.raises(SourceError, match=r"up_proj\.weight_scale_inv: holds negative scales.*`qbridge check`"):
        source.read_rows("model.layers.0.mlp.up_proj.weight", 0, 130)


def test_a_missing_block_scale_is_named(tmp_path: Path) -> None:
    deepseek(tmp_path / "model", {"model.layers.0.mlp.up_proj": (130, 256)})
    message = refusal(edited(tmp_path / "model", up_proj__weight_scale_inv=None))
    assert "model.layers.0.mlp.up_proj.weight_scale_inv: missing" in message


@pytest.mark.parametrize("preset", ["W8A16", "W4A16"])
def test_rows_that_end_within_an_int32_are_read(tmp_path: Path, preset: str) -> None:
    root = compressed_oracle.compress(ragged(75), preset, tmp_path / "model", channels=True)
    source, theirs = open_source(root), compressed_oracle.decompressed(root)
    assert [name for name, tensor in theirs.items() if not torch.equal(values(source, name), tensor)] == []


def test_codes_that_do_not_hold_the_weight_are_refused(tmp_path: Path) -> None:
    root = compressed_oracle.compress(llama(), "W4A16", tmp_path / "model")
    message = refusal(edited(root, up_proj__weight_shape=torch.tensor([640, 512])))
    assert "up_proj.weight_packed: is int32 (640, 32), which does not hold a weight of (640, 512)" in message


def test_asymmetric_weights_without_zero_points_are_refused(tmp_path: Path) -> None:
    root = compressed_oracle.compress(llama(), "W4A16", tmp_path / "model")
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (root / "config.json").write_text(json.dumps(config))
    assert "mlp.up_proj.weight_zero_point: missing; model.layers.0.mlp.up_proj.weight_packed cannot" in refusal(root)


@pytest.mark.parametrize("points", [0, 3])
def test_zero_points_of_0_are_those_of_symmetric_codes(tmp_path: Path, points: int) -> None:
    root = compressed_oracle.compress(llama(), "W8A8", tmp_path / "model")
    name = "model.layers.0.mlp.up_proj"
    before = values(open_source(root), f"{name}.weight")
    edited(root, up_proj__weight_zero_point=torch.full((640, 1), points, dtype=torch.int8))
    if points:
        assert f"{name}: asymmetric: its weight_zero_point is not 0" in refusal(root)
    else:
        source = open_source(root)
        assert torch.equal(values(source, f"{name}.weight"), before) and f"{name}.weight_zero_point" not in source.specs


def test_an_unknown_algorithm_names_the_nearest(tmp_path: Path) -> None:
    root = exported(modelopt(llama(), "fp8"), tmp_path / "out")
    config = json.loads((root / "hf_quant_config.json").read_text())
    config["quantization"]["quant_algo"] = "FP9"
    (root / "hf_quant_config.json").write_text(json.dumps(config))
    assert "quant_algo 'FP9' is unknown" in refusal(root) and "nearest: FP8" in refusal(root)


@pytest.mark.slow
def test_opening_imports_no_framework_and_reading_no_torch(tmp_path: Path) -> None:
    deepseek(tmp_path / "model", {"a": (130, 256)})
    code = (
        "import sys; from bridge.sources import open_source; s = open_source(sys.argv[1]);"
        "print('llvmlite' in sys.modules); s.read('a.weight');"
        "print(*[m for m in ('torch', 'transformers', 'ml_dtypes', 'compressed_tensors', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


def test_a_module_that_no_group_matches_is_named(tmp_path: Path) -> None:
    root = compressed_oracle.compress(llama(), "FP8_DYNAMIC", tmp_path / "model")
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    (root / "config.json").write_text(json.dumps(config))
    message = refusal(root)
    modules = ", ".join(f"model.layers.{{0..1}}.mlp.{name}_proj" for name in ("down", "gate", "up"))
    assert f"{modules}: no group of quantization_config matches it" in message


def test_a_quantized_checkpoint_whose_config_says_nothing_is_refused(tmp_path: Path) -> None:
    root = compressed_oracle.compress(llama(), "FP8_DYNAMIC", tmp_path / "model")
    config = json.loads((root / "config.json").read_text())
    del config["quantization_config"]
    (root / "config.json").write_text(json.dumps(config))
    assert "already quantized" in refusal(root) and "float8_e4m3fn values" in refusal(root)


@pytest.mark.parametrize(
    ("method", "section"),
    [
        ("gptq", transformers.GPTQConfig(bits=4).to_dict()),
        ("gptq", {"bits": 4, "quant_method": "gptq", "dynamic": {"-:.*attn.*": {}, "lm_head": {}}, "act_bits": 16}),
        ("awq", transformers.AwqConfig().to_dict()),
        ("fp8", transformers.FineGrainedFP8Config().to_dict()),
        ("mxfp4", transformers.Mxfp4Config().to_dict()),
    ],
)
def test_sections_that_programs_write_have_nothing_unread(method: str, section: dict[str, Any]) -> None:
    assert unknown(section, method) == {}


@pytest.mark.parametrize(
    ("method", "entry"),
    [
        ("compressed-tensors", {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}}),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}),
        ("gptq", {"act_bits": 8}),
        ("fp8", {"expert_dtype": "fp4"}),
    ],
)
def test_an_entry_that_may_say_what_codes_mean_is_named(method: str, entry: dict[str, Any]) -> None:
    assert unknown({"quant_method": method, **entry}, method) == entry


@pytest.mark.parametrize(
    ("shape", "entry", "why"),
    [
        ((128, 256), {"weight_block_size": [64, 256]}, r"weight_scale_inv: is float32 \(1, 2\), but the weight"),
        ((128, 256), {"weight_block_size": [64, 64]}, r"weight_scale_inv: is float32 \(1, 2\), but the weight"),
        ((128, 256), {"fmt": "e5m2"}, "fmt is 'e5m2', and its codes are float8_e4m3fn"),
    ],
)
def test_fp8_whose_config_contradicts_its_tensors_is_refused(
    tmp_path: Path, shape: tuple[int, int], entry: dict[str, Any], why: str
) -> None:
    root = tmp_path / "model"
    deepseek(root, {"model.layers.0.mlp.up_proj": shape})
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] |= entry
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=why):
        open_source(root)


@pytest.mark.parametrize(
    ("entry", "why"), [({"bits": 3}, "3 bits of gptq"), ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'")]
)
def test_a_wrong_entry_of_gptq_is_one_problem_for_all_modules(tmp_path: Path, entry: dict[str, Any], why: str) -> None:
    modules = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(2) for name in ("up", "down")]
    tensors = {f"{module}.qweight": torch.zeros((8, 64), dtype=torch.int32) for module in modules}
    tensors |= {f"{module}.scales": torch.ones((1, 64), dtype=torch.float16) for module in modules}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 64, **entry}
    torch_save(tensors, tmp_path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert message.count(why) == 1 and "model.layers.{0..1}.mlp.up_proj" in message and "\n" not in message
