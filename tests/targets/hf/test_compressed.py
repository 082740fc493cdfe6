"""`format="compressed-tensors"`: the bytes of llm-compressor, and what transformers loads and answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # noqa: E402
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GPT2Config, GPT2LMHeadModel  # noqa: E402

import bridge  # noqa: E402
from bridge.core.errors import BridgeError  # noqa: E402
from bridge.core.values import Numeric  # noqa: E402
from bridge.planning.contract_files import load_runtime  # noqa: E402
from bridge.planning.contracts import verdict  # noqa: E402
from bridge.quant.calibration import Calibration, Provenance  # noqa: E402
from bridge.quant.codec.kernels import INTEGER_RANGE  # noqa: E402
from bridge.quant.codec.packing import packed_codes, unpacked_codes  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.targets.hf.compressed_tensors import quantization_config  # noqa: E402
from tests.oracles import compressed_oracle, export_oracle, llm_compressor_golden  # noqa: E402

# compressed-tensors' presets that have a byte here, but for those with MX blocks
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "W4A16_ASYM", "W4AFP8", "NVFP4A16", "NVFP4")
NARROW_DTYPES = ("int2", "int3", "int5", "int6")
NARROW = ("W4A8", "W2A16", "W3A16", "W3A8", "W5A16", "W6A16")
MX = ("MXFP8", "MXFP8A16", "MXFP4", "MXFP4A16")
STATIC = ("FP8", "NVFP4")
IDS = torch.randint(0, 80, (2, 24), generator=torch.Generator().manual_seed(1))
PROVENANCE = Provenance("", "", "", "", "", "", 0, 0)
INPUT_AMAX, K_AMAX, V_AMAX = np.float32(3.5), np.float32(1.75), np.float32(0.875)


def calibration(source: Path) -> Calibration:
    """The same statistics for every module: what is written of them is a formula."""
    modules = [name.removesuffix(".weight") for name in open_source(source).specs if name.endswith("_proj.weight")]
    attention = sorted({module.rpartition(".")[0] for module in modules if ".self_attn." in module})
    by = {module: np.array(INPUT_AMAX) for module in modules}
    keys, values = ({a: np.array(amax) for a in attention} for amax in (K_AMAX, V_AMAX))
    return Calibration(PROVENANCE, by, k_amax=keys, v_amax=values)


def convert(source: Path, preset: str, out: Path, kv: str | None = None, **options: Any) -> Path:
    quant = f"ct:{preset}"
    calib = calibration(source) if preset in STATIC or kv else None
    options = {"verify": False, "own_scales": True} | options
    bridge.convert(source, target="hf", quant=quant, out=out, calib=calib, kv=kv, **options)
    return out


def section(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return found


def source_model(root: Path, dtype: str = "bfloat16") -> tuple[Path, Any]:
    source = llm_compressor_golden.write_source(root, dtype)
    return source, open_source(source).load_model()


@pytest.mark.parametrize("preset", llm_compressor_golden.PRESETS)
def test_tensors_are_those_of_llm_compressor(tmp_path: Path, preset: str) -> None:
    golden = json.loads(llm_compressor_golden.GOLDEN.read_text())[preset]
    out = convert(llm_compressor_golden.write_source(tmp_path / "source"), preset, tmp_path / "out")
    assert llm_compressor_golden.digests(out) == golden["tensors"]


@pytest.mark.parametrize("preset", llm_compressor_golden.PRESETS)
def test_the_config_says_what_that_of_llm_compressor_says(tmp_path: Path, preset: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    golden = json.loads(llm_compressor_golden.GOLDEN.read_text())[preset]["quantization_config"]
    ours = section(convert(llm_compressor_golden.write_source(tmp_path / "source"), preset, tmp_path / "out"))
    (group,) = golden["config_groups"].values()
    assert ours["config_groups"] == {"group_0": group}
    assert ours["ignore"] == ["lm_head"]  # llm-compressor's expression for embeddings matches no Linear
    same = {
        key: value for key, value in golden.items() if key not in ("config_groups", "ignore", "moe_sparsity_config")
    }
    assert {key: ours[key] for key in same} == same
    assert QuantizationConfig.model_validate(ours).quantization_status == "compressed"


def other_experts(directory: Path, model: str, preset: str) -> set[str]:
    """Modules of experts whose tensors are not those of llm-compressor."""
    golden = json.loads(llm_compressor_golden.GOLDEN.read_text())[model][preset]
    found = {name: said for name, said in llm_compressor_golden.digests(directory).items() if ".experts." in name}
    assert found.keys() == golden.keys()
    return {name.rpartition(".")[0] for name in golden if found[name] != golden[name]}


@pytest.mark.parametrize("preset", llm_compressor_golden.EXPERT_PRESETS)
@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe"])
def test_experts_are_those_of_llm_compressor(tmp_path: Path, model: str, preset: str) -> None:
    """Its `model_free_ptq` knows gate and up of experts by the names w1 and w3 only; its `oneshot` by both."""
    source = llm_compressor_golden.write_source(tmp_path / "source", model=model)
    out = convert(source, preset, tmp_path / "out")
    apart = other_experts(out, model, preset)
    if (model, preset) != ("qwen3-moe", "NVFP4A16"):
        assert apart == set()
        return
    assert apart and {module.rpartition(".")[2] for module in apart} <= {"gate_proj", "up_proj"}
    weights, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    for expert in ("model.layers.0.mlp.experts.0", "model.layers.0.mlp.experts.1"):
        pair = [weights[f"{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")]
        for weight, part in zip(pair, ("gate_proj", "up_proj"), strict=True):
            theirs = compressed_oracle.qparams(weight, scheme, max(other.abs().max() for other in pair))
            assert torch.equal(ours[f"{expert}.{part}.weight_global_scale"], theirs["weight_global_scale"].reshape(1))
            scale = ours[f"{expert}.{part}.weight_scale"]
            assert torch.equal(scale.float(), theirs["weight_scale"].to(scale.dtype).float())


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe"])
def test_experts_in_fp8_may_have_a_scale_each(tmp_path: Path, model: str) -> None:
    """As llm-compressor has them: it shares no scale of a tensor but NVFP4's."""
    source = llm_compressor_golden.write_source(tmp_path / "source", model=model)
    plan = bridge.plan(source, target="hf", quant="ct:FP8")
    calib = Calibration(PROVENANCE, {step.site.module: np.array(INPUT_AMAX) for step in plan.quantized if step.site})
    options: dict[str, Any] = {"own_scales": True, "verify": False}
    bridge.convert(source, target="hf", quant="ct:FP8", out=tmp_path / "out", calib=calib, **options)
    weights, ours = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    scheme = preset_name_to_scheme("FP8", ["Linear"])
    experts = [name for name in weights if ".experts." in name]
    assert len(experts) == 6 and len({float(ours[f"{name}_scale"]) for name in experts}) > 2
    for name in experts:
        theirs = compressed_oracle.qparams(weights[name], scheme, None)["weight_scale"]
        assert torch.equal(ours[f"{name}_scale"], theirs.reshape(1))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize("preset", [*PRESETS, *NARROW, *MX])
def test_tensors_are_those_of_compressed_tensors(tmp_path: Path, preset: str, dtype: str) -> None:
    source, model = source_model(tmp_path / "source", dtype)
    theirs = load_file(compressed_oracle.compress(model, preset, tmp_path / "theirs") / "model.safetensors")
    ours = load_file(convert(source, preset, tmp_path / "out") / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.endswith(("input_scale", "input_global_scale")):
            continue  # the oracle has not seen our calibration
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("preset", [*PRESETS, *NARROW, *MX])
def test_logits_in_transformers_are_those_of_our_weights(tmp_path: Path, preset: str) -> None:
    source, _ = source_model(tmp_path / "source")
    out = convert(source, preset, tmp_path / "out")
    plain = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        ours = open_source(out).load_model()(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out, quantization_config=plain)(IDS).logits, ours)
        # transformers 5.23 takes packed zero points, compressed-tensors' own too, for misshapen unless it dequantizes
        if load_scheme(f"ct:{preset}").input is None and preset != "W4A16_ASYM":
            assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, ours)


@pytest.mark.parametrize(
    ("dtype", "block"),
    [*itertools.product(("int4", "int8"), (16, 32, 64, None)), *itertools.product(NARROW_DTYPES, (32, 64))],
)
def test_transformers_loads_integers_in_groups_of_any_size(tmp_path: Path, dtype: str, block: int | None) -> None:
    """Its contract has a row for each: a kernel would take some, and it decodes all."""
    source, _ = source_model(tmp_path / "source")
    size = f'per = "block"\nblock = [{block}]' if block else 'per = "channel"'
    gate = "cosine = 0.8\nnorm = [0.5, 1.5]"
    path = tmp_path / "own.toml"
    path.write_text(
        f'summary = "own"\n[[weight]]\ndtype = "{dtype}"\n{size}\n[parity.tensor]\n{gate}\n[parity.output]\n{gate}\n'
    )
    plan = bridge.plan(source, "transformers", path, format="compressed-tensors")
    assert not verdict(load_runtime("transformers"), plan).why_not and plan.quantized
    out = tmp_path / "out"
    bridge.convert(source, target="hf", quant=path, out=out, format="compressed-tensors", verify=False)
    with torch.no_grad():
        ours = open_source(out).load_model()(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, ours)


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize("cols", [31, 64, 97])
def test_codes_of_few_bits_are_packed_as_compressed_tensors_packs_them(dtype: str, cols: int) -> None:
    """Also along rows that end within a word."""
    low, high = (int(end) for end in INTEGER_RANGE[dtype])
    codes = np.random.default_rng(cols).integers(low, high + 1, (5, cols)).astype(np.int8)
    words = packed_codes(codes.view(np.uint8), dtype, "int32")
    assert np.array_equal(words, pack_to_int32(torch.from_numpy(codes), int(dtype[-1])).numpy())
    assert np.array_equal(unpacked_codes(words, dtype, "int32", cols).view(np.int8), codes)


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_zero_points_of_few_bits_are_those_of_compressed_tensors(tmp_path: Path, dtype: str) -> None:
    source, model = source_model(tmp_path / "source")
    gate = "cosine = 0.8\nnorm = [0.5, 1.5]"
    (tmp_path / "own.toml").write_text(
        f'summary = "own"\nrounding = "llm-compressor"\n[[weight]]\ndtype = "{dtype}"\nper = "block"\nblock = [128]\n'
        f"zero_points = true\n[parity.tensor]\n{gate}\n[parity.output]\n{gate}\n"
    )
    theirs = load_file(
        compressed_oracle.compress(model, f"W{dtype[-1]}A16", tmp_path / "theirs", symmetric=False)
        / "model.safetensors"
    )
    report = bridge.convert(source, target="hf", quant=tmp_path / "own.toml", out=tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert report.passed and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    plain = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        answer = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=plain)(IDS).logits
        assert torch.equal(answer, open_source(tmp_path / "out").load_model()(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int4_awq", "int8", "int8_sq"])
def test_logits_of_a_smoothed_model_in_transformers_are_those_of_our_weights(tmp_path: Path, quant: str) -> None:
    """Norms and previous matrices hold the pre-scales: transformers is told of none, and multiplies by none."""
    source, _ = source_model(tmp_path / "source")
    out = tmp_path / "out"
    report = bridge.convert(source, target="hf", quant=quant, out=out, data=[IDS], format="compressed-tensors")
    assert report.passed
    assert not any("pre_quant_scale" in name for name in load_file(out / "model.safetensors"))
    plain = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        ours = open_source(out).load_model()(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out, quantization_config=plain)(IDS).logits, ours)
        if quant == "int4_awq":
            assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, ours)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "int8_sq"])
def test_activations_in_int8_run_in_transformers(tmp_path: Path, quant: str) -> None:
    """compressed-tensors quantizes the activations under our static scales; the weights alone must be nearer."""
    source, model = source_model(tmp_path / "source", "float32")
    out = tmp_path / "out"
    bridge.convert(source, target="hf", quant=quant, out=out, data=[IDS], format="compressed-tensors")
    with torch.no_grad():
        before, after = model(IDS).logits, AutoModelForCausalLM.from_pretrained(out)(IDS).logits
    assert 0 < (after - before).norm() / before.norm() < 0.15  # int8_sq: 0.092, its gate allows 0.25
    scales = load_file(out / "model.safetensors")
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({float(scales[f"model.layers.1.{part}.input_scale"]) for part in group}) == 1


def test_a_tied_head_is_none_of_the_quantized_modules(tmp_path: Path) -> None:
    """The target of a group is every Linear: transformers replaces what is not listed and looks for its scale."""
    _, model = source_model(tmp_path / "untied")
    model.config.tie_word_embeddings, model.lm_head.weight = True, model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "source")
    out = convert(tmp_path / "source", "W8A16", tmp_path / "out")
    assert section(out)["ignore"] == ["lm_head"]
    with torch.no_grad():
        ours = open_source(out).load_model()(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, ours)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_input_scales_are_those_of_a_calibration(tmp_path: Path, dtype: str) -> None:
    source, _ = source_model(tmp_path / "source", dtype)
    name = "model.layers.0.mlp.down_proj."
    fp8 = load_file(convert(source, "FP8", tmp_path / "fp8") / "model.safetensors")[f"{name}input_scale"]
    kind = getattr(torch, dtype)
    assert torch.equal(fp8, (torch.tensor([INPUT_AMAX]) / 448).to(kind))
    nvfp4 = load_file(convert(source, "NVFP4", tmp_path / "nvfp4") / "model.safetensors")[f"{name}input_global_scale"]
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    amax = torch.tensor(float(INPUT_AMAX), dtype=kind)
    assert torch.equal(nvfp4, generate_gparam(-amax, amax))


def test_kv_scales_stand_beside_their_attention_module(tmp_path: Path) -> None:
    source, _ = source_model(tmp_path / "source")
    out = convert(source, "FP8_DYNAMIC", tmp_path / "out", kv="fp8")
    tensors = load_file(out / "model.safetensors")
    for part, amax in (("k_scale", K_AMAX), ("v_scale", V_AMAX)):
        scale = tensors[f"model.layers.1.self_attn.{part}"]
        assert torch.equal(scale, torch.tensor([amax / np.float32(448)]).to(torch.bfloat16))
    scheme = section(out)["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"], scheme["dynamic"]) == (8, "float", "tensor", False)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.model.layers[1].self_attn.k_scale.detach(), tensors["model.layers.1.self_attn.k_scale"])


def test_what_is_spelled_alike_is_one_group(tmp_path: Path) -> None:
    """INT4 AWQ has formats with and without pre-scales, which are spelled alike once they are folded."""
    plan = bridge.plan(export_oracle.source("mixtral", "bf16"), "hf", "int4_awq", format="compressed-tensors")
    assert len({step.format for step in plan.quantized}) > 1
    groups = quantization_config(plan)["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"]]


@pytest.mark.slow
def test_a_mixed_recipe_names_the_modules_of_each_group(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "fp8_block"\n[[rule]]\nroles = ["mlp.down.weight"]\nquant = "int4_wo"\n')
    source, _ = source_model(tmp_path / "source")
    out = tmp_path / "out"
    bridge.convert(source, target="hf", quant=recipe, out=out, format="compressed-tensors", verify=False)
    assert section(out)["format"] == "mixed-precision"
    groups = section(out)["config_groups"]
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert [group["targets"] for group in groups.values() if group["format"] == "pack-quantized"] == [down]
    with torch.no_grad():
        ours = open_source(out).load_model()(IDS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(IDS).logits, ours)


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        ("w4a8_awq", "has one level of weight quantization"),
        ("w4a8_nvfp4_fp8", "has FP4 in blocks of 16 with FP8 scales, or of 32 with power-of-two scales"),
        (dataclasses.replace(load_scheme("w4a8_awq"), algorithm="max"), "has one level of weight quantization"),
    ],
)
def test_what_it_cannot_say_is_refused_before_work(tmp_path: Path, quant: Any, words: str) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source")
    with pytest.raises(BridgeError, match=words):
        bridge.plan(source, target="hf", quant=quant, format="compressed-tensors")


def test_matrices_that_are_no_linear_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=80, n_positions=48)).save_pretrained(tmp_path)
    with pytest.raises(BridgeError, match=r"is stored \[in, out\] \(Conv1D\)"):
        bridge.plan(tmp_path, target="hf", quant="fp8_pc_pt", format="compressed-tensors")


def test_blocks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source")
    with pytest.raises(BridgeError, match="in = 384 does not divide into blocks of 256"):
        bridge.plan(
            source,
            target="hf",
            quant=dataclasses.replace(load_scheme("ct:W4A16"), weight=(Numeric("int4", "block", (256,)),)),
            format="compressed-tensors",
        )


def test_a_written_directory_that_lost_a_scale_is_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from bridge.targets.hf.lint import lint

    out = convert(llm_compressor_golden.write_source(tmp_path / "source"), "NVFP4A16", tmp_path / "out")
    assert lint(out) == []
    state = load_file(out / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight_global_scale"]
    save_file(state, out / "model.safetensors")
    (finding,) = lint(out)
    assert "model.layers.1.mlp.up_proj.weight_global_scale: missing" in finding


@pytest.mark.slow
def test_the_report_of_a_conversion_passes(tmp_path: Path) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source")
    for preset in ("FP8", "NVFP4", "W8A16"):
        calib = calibration(source) if preset in STATIC else None
        quant = f"ct:{preset}"
        report = bridge.convert(
            source, target="hf", quant=quant, out=tmp_path / preset, calib=calib, format="compressed-tensors"
        )
        assert report.passed and len(report.parity.tensors) == 14


@pytest.mark.parametrize("preset", [p for p in [*PRESETS, *MX] if p not in STATIC])
def test_a_zero_matrix_gets_positive_scales_and_zero_codes(tmp_path: Path, preset: str) -> None:
    from safetensors.torch import save_file

    source = llm_compressor_golden.write_source(tmp_path / "source")
    state, name = load_file(source / "model.safetensors"), "model.layers.0.mlp.down_proj"
    state[f"{name}.weight"].zero_()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    out = convert(source, preset, tmp_path / "out")
    scale = load_file(out / "model.safetensors")[f"{name}.weight_scale"]
    values = scale.float() if scale.dtype != torch.uint8 else torch.exp2(scale.float() - 127)
    assert values.isfinite().all() and (values > 0).all()
    assert not open_source(out).read(f"{name}.weight").any()


def test_shards_are_loaded_by_transformers(tmp_path: Path) -> None:
    source, _ = source_model(tmp_path / "source")
    out = convert(source, "W4A16", tmp_path / "out", shard_size="100KB")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(out)(IDS).logits, open_source(out).load_model()(IDS).logits
        )
