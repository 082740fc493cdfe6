"""Target `tripy`: what is planned, refused, written and found; no model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import bridge
from bridge.core.dtypes import from_float32
from bridge.core.errors import BridgeError, PlanError, SchemeError, SourceError, UsageError
from bridge.core.mappings import mappings
from bridge.core.values import TensorSpec
from bridge.quant.calibration import Calibration, Provenance
from bridge.targets.tripy.lint import audit, lint
from bridge.targets.tripy.models.build import no_ready_module
from tests.models.export_families import build
from tests.models.sources_made import CONFIG, MadeSource, made_llama
from tests.oracles import export_oracle as oracle
from tests.oracles import tripy_oracle as tripy
from tests.tables.checkpoints import headers


def made(config: dict[str, Any] = CONFIG, dtype: str = "float32", **changes: np.ndarray) -> MadeSource:
    """Random tensors for a config; `changes` as in `made_llama`."""
    if config is CONFIG:
        return made_llama(dtype, **changes)
    rng, specs = np.random.default_rng(3), headers(config)
    arrays = {n: from_float32(rng.standard_normal(s.shape, np.float32), dtype) for n, s in specs.items()}
    return MadeSource(arrays, {n: TensorSpec(n, s.shape, dtype) for n, s in specs.items()}, config)


def seen(source: MadeSource, amax: float = 4.0) -> Calibration:
    """Statistics of activations as if every input had been `amax` at most."""
    inputs = {name.removesuffix(".weight"): np.array(amax, np.float32) for name in source.specs}
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), input_amax=inputs)


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("quant", "entry"),
    [
        ("int8_wo", ("int8", 0, "out_in", None, False, False)),
        ("int4_wo", ("int4", None, "in_out", 128, False, False)),
        ("fp8", ("float8", None, "out_in", None, True, False)),
    ],
)
def test_config_says_how_each_layer_is_built(quant: str, entry: tuple[Any, ...], tmp_path: Path) -> None:
    source = made()
    tensors, section = tripy.convert(source, quant, tmp_path / "out", calib=seen(source), dtype="fp16")
    words = ("quant_dtype", "weight_quant_dim", "layout", "block", "input_scale", "pre_quant_scale")
    assert section["modules"][DOWN] == dict(zip(words, entry, strict=True))
    assert len(section["modules"]) == 21
    assert (section["format"], section["dtype"], section["snapped"], section["copies"]) == (1, "float16", True, {})
    shapes = {part: tuple(t.shape) for part in tripy.COMPANIONS if (t := tensors.get(f"{DOWN}.{part}")) is not None}
    weight, scale = ((384, 128), (3, 128)) if quant == "int4_wo" else ((128, 384), (128,) if quant == "int8_wo" else ())
    assert tensors[f"{DOWN}.weight"].shape == weight
    assert shapes == {"weight_scale": scale} | ({"input_scale": ()} if quant == "fp8" else {})


def test_int4_for_plain_linears_has_its_blocks_along_out(tmp_path: Path) -> None:
    source = made(CONFIG | {"num_key_value_heads": 4})
    tensors, section = tripy.convert(source, "int4_wo", tmp_path / "out", linear=True)
    up = "model.layers.0.mlp.up_proj"
    assert (
        section["modules"][up] | {"layout": "out_in", "block": 128, "weight_quant_dim": None} == section["modules"][up]
    )
    weight, scale = torch.from_numpy(source.arrays[f"{up}.weight"]), tensors[f"{up}.weight_scale"]
    assert scale.shape == (3, 128)  # of 384 x 128
    torch.testing.assert_close(scale, weight.reshape(3, 128, 128).abs().amax(1) / 7, rtol=0, atol=0)
    mine = tripy.ours(tensors, up, section["modules"][up])
    factor = torch.tensor(7.0) / weight.reshape(3, 128, 128).abs().amax(1)
    assert torch.equal(mine.codes, (weight * factor.repeat_interleave(128, 0)).round())
    assert torch.equal(tensors[f"{up}.weight"], mine.codes * mine.scale)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_float_is_rounded_to_the_modules_dtype_once(dtype: str, tmp_path: Path) -> None:
    source = made()
    tensors, _ = tripy.convert(source, "int8_wo", tmp_path / "out", dtype=dtype)
    kind = oracle.DTYPES[dtype]
    assert {tensor.dtype for tensor in tensors.values()} == {kind}
    for name in ("model.norm.weight", "lm_head.weight"):
        assert torch.equal(tensors[name], torch.from_numpy(source.arrays[name]).to(kind))


# Recipes


def recipe(root: Path, text: str) -> str:
    (root / "recipe.toml").write_text(text)
    return str(root / "recipe.toml")


def test_a_recipe_mixes_schemes_and_keeps_a_layer(tmp_path: Path) -> None:
    text = """
base = "fp8"
[[rule]]
layers = [0]
quant = "none"
[[rule]]
roles = ["mlp.down.weight"]
quant = "int4_wo"
override = true
"""
    source = made()
    tensors, section = tripy.convert(source, recipe(tmp_path, text), tmp_path / "out", calib=seen(source))
    kinds = {module: entry["quant_dtype"] for module, entry in section["modules"].items()}
    assert {module for module, kind in kinds.items() if kind == "int4"} == {DOWN.replace("1", str(n)) for n in range(3)}
    assert len(kinds) == 15 and {kind for module, kind in kinds.items() if "down" not in module} == {"float8"}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors[name], torch.from_numpy(source.arrays[name]))


def test_a_quantized_head_of_a_tied_model_is_not_its_embedding(tmp_path: Path) -> None:
    text = 'base = "int8_wo"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int8_wo"\n'
    directory = oracle.save(build("gpt2", torch.float32), tmp_path / "source")
    tensors, section = tripy.convert(directory, recipe(tmp_path, text), tmp_path / "out")
    embedding, head = tensors["transformer.wte.weight"], tensors["lm_head.weight"]
    assert "lm_head" in section["modules"] and section["copies"] == {}
    assert torch.equal(embedding, oracle.load(directory).transformer.wte.weight)
    scale = tensors["lm_head.weight_scale"][:, None]
    factor = torch.tensor(127.0) / embedding.abs().amax(1, keepdim=True)
    assert torch.equal(head, (embedding * factor).round() * scale)
    assert not torch.equal(head, embedding)


@pytest.mark.parametrize("quant", ["int8_wo", None])
def test_a_written_model_is_no_source(quant: str | None, tmp_path: Path) -> None:
    """Quantized it holds scales of floats; unquantized, GPT-2's matrices lie the other way round."""
    says = "target tripy wrote this; give the checkpoint that it was made from"
    directory = oracle.save(build("gpt2", torch.float32), tmp_path / "source")
    tripy.convert(directory, quant, tmp_path / "out")
    with pytest.raises(BridgeError, match=says):
        bridge.plan(tmp_path / "out", "hf", None)


# Refusals


@pytest.mark.parametrize(
    ("quant", "options", "says"),
    [
        ("nvfp4", {}, "Tripy has no float4_e2m1fn; it quantizes to int8, int4 and float8: use fp8, int8_wo or"),
        ("mxfp4_wo", {}, "Tripy has no float4_e2m1fn"),
        ("mxfp8", {}, "Tripy has block scales for int4 only, not for float8_e4m3fn blocks of 32; use fp8 or int8_wo"),
        ("fp8_block", {}, "Tripy has block scales for int4 only, not for float8_e4m3fn blocks of 128x128; use fp8 or"),
        ("fp8_pc_pt", {}, "Tripy's scales are constants, one for a whole input, not made per token at run time"),
        ("w4a8_awq", {}, "Tripy's quantize has one level, not one dtype after another; use int4_awq or fp8"),
        ("int8_sq", {"linear": True}, "the pre-scale of smoothquant; leave out linear (--linear), or use int8_wo"),
        ("int4_awq", {"linear": True}, "the pre-scale of awq; leave out linear (--linear), or use int4_wo"),
    ],
)  # fmt: skip
def test_a_scheme_that_tripy_cannot_express_is_refused(quant: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError) as error:
        bridge.plan(made(), "tripy", quant, **options)
    assert says in str(error.value)


def test_a_kv_cache_is_refused() -> None:
    with pytest.raises(
        PlanError, match="KV cache: Tripy has no cache module, so nothing would read the KV scales; leave"
    ):
        bridge.plan(made(), "tripy", "fp8", kv="fp8")


@pytest.mark.parametrize(
    ("linear", "lines"),
    [
        (False, ["model.layers.{0..2}.mlp.down_proj: in = 224 does not divide into blocks of 128, and Tripy"]),
        (True, ["model.layers.{0..2}.mlp.gate_proj, model.layers.{0..2}.mlp.up_proj: out = 224 does not divide into"]),
    ],
)  # fmt: skip
def test_blocks_that_do_not_divide_are_one_line_with_all_layers(linear: bool, lines: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"  # of a scheme by name, or a recipe, the blocks would be 32
    recipe.write_text((mappings() / "schemes" / "int4_wo.toml").read_text())
    source = made(CONFIG | {"intermediate_size": 224, "num_key_value_heads": 4})
    with pytest.raises(PlanError) as error:
        bridge.plan(source, "tripy", str(recipe), linear=linear)
    said = str(error.value).splitlines()[1:]
    assert len(said) == len(lines)
    for line, expected in zip(said, lines, strict=True):
        assert line.strip().startswith(expected) and line.endswith("write a recipe with block = 32")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "fp8"}, "dtype 'fp8' is not a dtype"),
        ({"dtype": "int8"}, "dtype 'int8' is not a dtype of Tripy modules; use fp32, fp16 or bf16"),
        ({"tp": 2}, "target tripy has no option 'tp'"),
    ],
)
def test_a_wrong_option_is_a_wrong_call(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bridge.plan(made(), "tripy", "int8_wo", **options)


@pytest.mark.parametrize(
    ("changed", "quant", "says"),
    [
        ({"model__layers__1__mlp__down_proj__weight": np.nan}, "int8_wo", "repair the checkpoint"),
        ({"model__layers__1__mlp__down_proj__weight": np.inf}, "int4_wo", "repair the checkpoint"),
        (
            {"model__layers__1__mlp__down_proj__weight": 1e6},
            "int8_wo",
            rf"{DOWN}\.weight: does not fit float16; choose",
        ),
        ({"model__layers__1__mlp__down_proj__weight": 1e6}, "int4_wo", "does not fit float16; choose another dtype"),
        ({"model__norm__weight": 1e6}, "int8_wo", r"model\.norm\.weight: 1e\+06 does not fit float16; choose another"),
    ],
)
def test_a_number_that_float16_has_not_leaves_nothing(
    changed: dict[str, float], quant: str, says: str, tmp_path: Path
) -> None:
    (name, value) = next(iter(changed.items()))
    array = made_llama().arrays[name.replace("__", ".").replace("down.proj", "down_proj")].copy()
    array.reshape(-1)[-7] = value
    with pytest.raises(SourceError, match=says):
        bridge.convert(made(**{name: array}), "tripy", quant, tmp_path / "out", dtype="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("amax", "kind"), [(1e9, "infinite"), (1e-9, "zero")])
def test_no_input_scale_is_zero_or_infinite_in_float16(amax: float, kind: str, tmp_path: Path) -> None:
    source = made()
    if kind == "infinite":
        with pytest.raises(SourceError, match=r"input_scale: a scale does not fit float16; choose another dtype"):
            bridge.convert(source, "tripy", "fp8", tmp_path / "out", calib=seen(source, amax), dtype="fp16")
        return
    tensors, _ = tripy.convert(source, "fp8", tmp_path / "out", calib=seen(source, amax), dtype="fp16")
    assert float(tensors[f"{DOWN}.input_scale"]) == 2.0**-24


@pytest.mark.parametrize("quant", ["int8_wo", "int4_wo"])
def test_scales_that_were_rounded_up_are_told(quant: str, tmp_path: Path) -> None:
    name = f"{DOWN}.weight"
    source = made(**{name: made().arrays[name] * np.float32(1e-5)})
    report = bridge.convert(source, "tripy", quant, tmp_path / "half", dtype="fp16")
    count = 384 if quant == "int4_wo" else 128
    assert report.policies == {name: f"{count} scales below the normal numbers of float16: rounded up (--dtype)"}
    assert bridge.convert(source, "tripy", quant, tmp_path / "brain", dtype="bf16").policies == {}
    assert lint(tmp_path / "half") == []


@pytest.mark.slow
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("quant", ["int8_wo", "int4_wo"])
def test_a_doubled_scale_is_found_in_every_layout(quant: str, linear: bool, tmp_path: Path) -> None:
    source = made(CONFIG | {"num_key_value_heads": 4})
    tensors, _ = tripy.convert(source, quant, tmp_path / "out", dtype="bf16", linear=linear)
    name = f"{DOWN}.weight_scale"
    tensors[name].view(-1)[7] *= 2
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    (found,) = audit(tmp_path / "out")
    assert found.startswith(f"error [tripy] {DOWN}: has ") and "not a code times its weight_scale" in found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "there is no ready Tripy module for PhiForCausalLM"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "LlamaForCausalLM has no rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "LlamaForCausalLM has no rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, ""),
    ],
)
def test_a_model_without_a_ready_module_is_told_before_the_run(change: dict[str, Any], says: str) -> None:
    found = no_ready_module(CONFIG | change)
    assert says in found and bool(found) == bool(says)
    assert not says or found.endswith("write your own and fill it: bridge.targets.tripy.load(directory, module)")


def test_the_plan_has_that_note() -> None:
    dynamic = CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert [no_ready_module(dynamic)] == list(bridge.plan(made(dynamic), "tripy", "int8_wo").notes[-1:])
    assert "ready" not in " ".join(bridge.plan(made(), "tripy", "int8_wo").notes)


class Named:
    """A dtype as nvtripy has them."""

    name = "float16"


@pytest.mark.parametrize("target", ["tripy", "hf", "trt", "trtllm"])
@pytest.mark.parametrize("dtype", [torch.float16, np.float16, np.dtype("float16"), Named(), "torch.float16", "half"])
def test_every_target_takes_a_dtype_by_any_name(target: str, dtype: Any) -> None:
    source = made(CONFIG | {"rms_norm_eps": 1e-6, "hidden_act": "silu"})  # which trtllm must know
    assert bridge.plan(source, target, "int8_wo", dtype=dtype).options["dtype"] == "float16"


@pytest.mark.parametrize("target", ["tripy", "hf", "trt", "trtllm"])
@pytest.mark.parametrize("dtype", [16, True, ["fp16"], torch.int4, object])
def test_every_target_refuses_what_is_no_dtype(target: str, dtype: Any) -> None:
    with pytest.raises(UsageError, match=r"dtype ['\"]"):
        bridge.plan(made(), target, "int8_wo", dtype=dtype)


@pytest.mark.parametrize(("target", "option"), [("tripy", "linear"), ("trt", "custom_ops"), ("trt", "stamp")])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_an_option_of_two_values_takes_no_other(target: str, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"option '{option}' of target {target} must be True or False"):
        bridge.plan(made(), target, "int8_wo", **{option: value})
