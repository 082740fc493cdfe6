"""`format="awq"`, `"gptq"` and `"deepseek"`: words as vLLM packs them, values as they are read back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: E402

import bridge  # noqa: E402
from bridge.core.dtypes import to_float32  # noqa: E402
from bridge.core.errors import BridgeError  # noqa: E402
from bridge.core.values import Encoding, Numeric  # noqa: E402
from bridge.quant.codec.encode import encode  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.oracles import llm_compressor_golden, packing_golden  # noqa: E402

WRITTEN = (("awq", "int4_wo"), ("gptq", "int4_wo"), ("gptq", "int8_wo"), ("deepseek", "fp8_block"))
NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)


def converted(root: Path, form: str, quant: Any, dtype: str = "bfloat16", **options: Any) -> Path:
    source = llm_compressor_golden.write_source(root / "source", dtype)
    bridge.convert(source, target="hf", quant=quant, out=root / "out", format=form, **({"verify": False} | options))
    return root / "out"


@pytest.mark.parametrize("kind", packing_golden.KINDS)
def test_words_are_those_of_vllm(kind: str) -> None:
    """Weights that are their own codes: the largest of each row makes the scale 1."""
    unsigned, bits = packing_golden.codes(kind), packing_golden.KINDS[kind]
    half = 1 << (bits - 1)
    signed = (unsigned - half).astype(np.float32).T
    numeric = Numeric("int4" if bits == 4 else "int8", "channel")
    coding = Encoding(packed="awq" if kind == "awq" else "int32", bound=float(half))
    assert (np.abs(signed).max(axis=1) == half).all()
    words = encode(signed, "float32", (numeric,), transpose=True, coding=coding)["codes"]
    assert packing_golden.digest(words) == json.loads(packing_golden.GOLDEN.read_text())[kind]


def awq_values(tensors: dict[str, Any], module: str) -> Any:
    """(codes - zeros) * scales as AutoAWQ's documentation of its GEMM kernel has it."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    codes, zeros = (
        ((tensors[f"{module}.{part}"].unsqueeze(-1) >> NIBBLES) & 15)[..., order].flatten(1)
        for part in ("qweight", "qzeros")
    )
    block = len(codes) // len(zeros)
    wide = [part.repeat_interleave(block, 0) for part in (zeros, tensors[f"{module}.scales"].float())]
    return ((codes - wide[0]) * wide[1]).T


def gptq_values(tensors: dict[str, Any], module: str, bits: int, added: int = 1) -> Any:
    """(codes - (zeros + added)) * scales, by the group that g_idx names, as GPTQ's kernels compute it.

    gptqmodel adds one to the zero points of `checkpoint_format: gptq`, nothing to those of `gptq_v2`.
    """
    shifts, mask = torch.arange(0, 32, bits, dtype=torch.int32), (1 << bits) - 1
    codes = ((tensors[f"{module}.qweight"].unsqueeze(1) >> shifts[:, None]) & mask).flatten(0, 1)
    zeros = ((tensors[f"{module}.qzeros"].unsqueeze(-1) >> shifts) & mask).flatten(1) + added
    group = tensors[f"{module}.g_idx"].long()
    return ((codes - zeros[group]) * tensors[f"{module}.scales"].float()[group]).T


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("form", "quant"), WRITTEN[:3])
def test_kernels_compute_the_values_that_we_read(tmp_path: Path, form: str, quant: str, dtype: str) -> None:
    out = converted(tmp_path, form, quant, dtype)
    tensors, source = load_file(out / "model.safetensors"), open_source(out)
    plain = load_file(tmp_path / "source" / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(modules) == 14
    for module in modules:
        bits = 8 if quant == "int8_wo" else 4
        theirs = awq_values(tensors, module) if form == "awq" else gptq_values(tensors, module, bits)
        stored = np.ascontiguousarray(source.read(f"{module}.weight"))
        ours = torch.from_numpy(to_float32(stored, dtype))
        assert torch.equal(theirs.to(getattr(torch, dtype)).float(), ours)
        weight = plain[f"{module}.weight"].float()
        assert (
            torch.nn.functional.cosine_similarity(theirs.flatten(), weight.flatten(), 0) > 0.96
        )  # the gate of int4_wo
        assert tensors[f"{module}.scales"].dtype == (torch.float16 if dtype == "float32" else torch.bfloat16)


@pytest.mark.parametrize(("form", "quant"), WRITTEN)
def test_the_report_of_a_conversion_passes(tmp_path: Path, form: str, quant: str) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source")
    report = bridge.convert(source, target="hf", quant=quant, out=tmp_path / "out", format=form)
    assert report.passed and len(report.parity.tensors) == 14


def test_blocks_of_deepseek_are_dequantized_by_transformers(tmp_path: Path) -> None:
    """Its loader needs accelerate; the operation that it runs on each weight does not."""
    out = converted(tmp_path, "deepseek", "fp8_block")
    tensors, source = load_file(out / "model.safetensors"), open_source(out)
    names = [name for name in tensors if name.endswith("weight_scale_inv")]
    assert len(names) == 14
    for name in names:
        weight = name.removesuffix("_scale_inv")
        theirs = Fp8Dequantize(None)._dequantize_one(tensors[weight], tensors[name])
        ours = torch.from_numpy(to_float32(np.ascontiguousarray(source.read(weight)), "bfloat16"))
        assert torch.equal(theirs.to(torch.bfloat16).float(), ours)


@pytest.mark.slow
def test_configs_have_the_fields_that_loaders_read(tmp_path: Path) -> None:
    from transformers import AwqConfig, GPTQConfig

    for form, quant in WRITTEN:
        section = json.loads((converted(tmp_path / form / quant, form, quant) / "config.json").read_text())
        section = section["quantization_config"]
        assert section["quant_method"] == {"deepseek": "fp8"}.get(form, form)
        if form == "deepseek":
            assert section["weight_block_size"] == [128, 128] and section["activation_scheme"] == "dynamic"
            continue
        kind: Any = AwqConfig if form == "awq" else GPTQConfig
        read = kind.from_dict(section)
        assert (read.bits, read.group_size) == ((8, -1) if quant == "int8_wo" else (4, 128))
        needed = {"awq": ("zero_point",), "gptq": ("desc_act", "sym")}[form]  # vLLM's `get_from_keys` has no default
        assert all(key in section for key in needed)


@pytest.mark.parametrize(("form", "quant"), WRITTEN[:3])
def test_zero_points_that_are_not_the_middle_are_subtracted(tmp_path: Path, form: str, quant: str) -> None:
    out, module = converted(tmp_path, form, quant), "model.layers.1.mlp.up_proj"
    state = load_file(out / "model.safetensors")
    zeros, random = state[f"{module}.qzeros"], torch.Generator().manual_seed(3)
    bits = 8 if quant == "int8_wo" else 4
    words = torch.randint(0, 14, (*zeros.shape, 32 // bits), generator=random)  # GPTQ: 15 and one more is 16
    state[f"{module}.qzeros"] = (words << torch.arange(0, 32, bits)).sum(-1).int()
    save_file(state, out / "model.safetensors", {"format": "pt"})
    theirs = awq_values(state, module) if form == "awq" else gptq_values(state, module, bits)
    source = open_source(out)
    ours = to_float32(np.ascontiguousarray(source.read(f"{module}.weight")), "bfloat16")
    assert torch.equal(theirs.bfloat16().float(), torch.from_numpy(ours))
    with pytest.raises(BridgeError, match=r"up_proj: .*zero points"):
        bridge.plan(out, "hf")
    assert bridge.plan(out, "hf", "none").quantized == () and bridge.plan(out, "hf", "int8_wo").quantized


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero_points_of_awq_are_in_words_as_its_kernel_reads_them(tmp_path: Path, dtype: str) -> None:
    out = converted(tmp_path, "awq", "int4_wo", dtype, zero_points=True, group=32, verify=True)
    state, source = load_file(out / "model.safetensors"), open_source(out)
    plain = load_file(tmp_path / "source" / "model.safetensors")
    for module in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        theirs = awq_values(state, module)
        ours = to_float32(np.ascontiguousarray(source.read(f"{module}.weight")), dtype)
        assert torch.equal(theirs.to(getattr(torch, dtype)).float(), torch.from_numpy(ours))
        assert len(state[f"{module}.qzeros"].unique()) > 8
        blocks = plain[f"{module}.weight"].float().unflatten(1, (-1, 32))
        step = (blocks.amax(-1).clamp(min=0) - blocks.amin(-1).clamp(max=0)) / 15
        error = (theirs.unflatten(1, (-1, 32)) - blocks).abs().amax(-1)
        # half a step, and half of one more for a zero point that is rounded; scales have 8 bits in bfloat16
        assert (error <= step * (1 + 15 / 256)).all() and error.sum() < 0.7 * step.sum()


def test_a_changed_zero_point_is_found(tmp_path: Path) -> None:
    for form, name in (("awq", "qzeros"), ("compressed-tensors", "weight_zero_point")):
        out = converted(tmp_path / form, form, "int4_wo", zero_points=True)
        assert bridge.verify(out, against=tmp_path / form / "source").passed
        state = load_file(out / "model.safetensors")
        state[f"model.layers.1.mlp.up_proj.{name}"][0, 0] ^= 1
        save_file(state, out / "model.safetensors", {"format": "pt"})
        report = bridge.verify(out, against=tmp_path / form / "source")
        assert [row for row in report.parity.tensors if not row.passed and "1.mlp.up_proj" in row.name], form


@pytest.mark.parametrize(
    ("quant", "target", "options", "words"),
    [
        ("int4_wo", "trt", {}, "target trt has no place for the zero points of its blocks"),
        ("int4_wo", "gguf", {}, "target gguf has no place for the zero points of its blocks"),
        ("int4_wo", "hf", {"format": "gptq"}, "--format gptq has no zero points here"),
        ("int4_wo", "hf", {"format": "modelopt"}, "--format modelopt has no zero points here"),
        ("w4a8_fp8", "hf", {}, "scheme w4a8_fp8 has no INT4 weights in blocks"),
        ("fp8", "hf", {}, r"zero_points=True \(--zero-points\): scheme fp8 has no INT4 weights in blocks"),
        ("int4:gptq", "hf", {}, "scheme int4:gptq has no INT4 weights in blocks whose scales follow"),
        (None, "hf", {}, "zero_points=True needs a scheme too"),
    ],
)
def test_zero_points_where_nothing_takes_them_are_one_error(
    tmp_path: Path, quant: str | None, target: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BridgeError, match=words):
        bridge.plan("examples/models/tiny-llama", target, quant, zero_points=True, **options)


def test_zero_points_are_an_option_that_vllm_takes() -> None:
    plan = bridge.plan("examples/models/tiny-llama", "vllm", "int4_wo", zero_points=True)
    assert (plan.program, plan.options["format"]) == ("vllm", "compressed-tensors")
    assert {step.format.weight[0].zero_points for step in plan.quantized if step.format} == {True}
    with pytest.raises(BridgeError, match=r"loads weights in int4 per block of 128 .*, but not their zero points"):
        bridge.plan("examples/models/tiny-llama", "edgellm", "int4_wo", zero_points=True)


def edited(out: Path, section: dict[str, Any], **tensors: Any) -> dict[str, Any]:
    """Write other entries into quantization_config, and other tensors of one matrix: None takes one away."""
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= section
    (out / "config.json").write_text(json.dumps(config))
    state = load_file(out / "model.safetensors")
    for part, tensor in tensors.items():
        name = f"model.layers.0.mlp.down_proj.{part}"
        state.pop(name)
        state |= {} if tensor is None else {name: tensor}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return state


@pytest.mark.parametrize("quant", ["int4_wo", "int8_wo"])
def test_zero_points_of_gptq_v2_are_stored_without_an_offset(tmp_path: Path, quant: str) -> None:
    out, bits = converted(tmp_path, "gptq", quant), 4 if quant == "int4_wo" else 8
    state = load_file(out / "model.safetensors")
    one = int.from_bytes(bytes([0x11 if bits == 4 else 1]) * 4, "little")  # adds one to every zero point of a word
    state |= {name: (tensor + one).int() for name, tensor in state.items() if name.endswith("qzeros")}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(BridgeError, match="in checkpoint_format 'gptq_v2', not in 'gptq', which quantization_config"):
        open_source(out)
    # sym and desc_act say how codes were found; zero points and g_idx say what they mean
    edited(out, {"checkpoint_format": "gptq_v2", "sym": False, "desc_act": True})
    source, module = open_source(out), "model.layers.1.self_attn.v_proj"
    ours = to_float32(np.ascontiguousarray(source.read(f"{module}.weight")), "bfloat16")
    assert torch.equal(gptq_values(state, module, bits, added=0).bfloat16().float(), torch.from_numpy(ours))


@pytest.mark.parametrize(
    ("section", "tensors", "words"),
    [
        ({}, {"g_idx": torch.arange(384).flip(0).int() // 128}, "its columns are permuted"),
        ({}, {"g_idx": torch.zeros(7).int()}, r"g_idx has shape \(7,\), but its weight has 384 columns"),
        ({"desc_act": True}, {"g_idx": None}, "its columns may be permuted"),
        ({"sym": False}, {"qzeros": None}, "sym is false in quantization_config, but its zero points"),
        ({}, {"qzeros": torch.zeros(3, 32)}, "qzeros must be int32, but is float32"),
        ({}, {"qzeros": torch.zeros(3, 32).int()}, r"qzeros has shape \(3, 32\), but its scales have \(3, 128\)"),
        ({"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin' is not supported; known: gptq, gptq_v2"),
    ],
)
def test_a_refusal_of_gptq_names_what_is_wrong(
    tmp_path: Path, section: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    out = converted(tmp_path, "gptq", "int4_wo")
    edited(out, section, **tensors)
    with pytest.raises(BridgeError, match=f"down_proj[^:]*: {words}"):
        open_source(out)


@pytest.mark.parametrize(
    ("form", "quant", "words"),
    [
        ("awq", "int8_wo", "AutoAWQ's format holds INT4 weights, not int8"),
        ("gptq", "fp8_block", "GPTQ's format holds INT4 or INT8 weights"),
        ("gptq", "int8", "activations stay floats"),
        ("deepseek", "fp8", "FP8 weights in tiles of 128 x 128 only"),
    ],
)
def test_other_formats_are_refused_before_work(tmp_path: Path, form: str, quant: str, words: str) -> None:
    source = llm_compressor_golden.write_source(tmp_path / "source")
    with pytest.raises(BridgeError, match=re.escape(words)):
        bridge.plan(source, target="hf", quant=quant, format=form)


def test_one_format_for_all_modules_or_none(tmp_path: Path) -> None:
    source, recipe = llm_compressor_golden.write_source(tmp_path / "source"), tmp_path / "mixed.toml"
    recipe.write_text('base = "int4_wo"\n[[rule]]\nroles = ["mlp.down.weight"]\nquant = "int8_wo"\n')
    with pytest.raises(BridgeError, match="has another format than most modules"):
        bridge.plan(source, target="hf", quant=recipe, format="gptq")


def test_gptq_names_every_kept_module_wherever_it_is(tmp_path: Path) -> None:
    """SGLang takes every Linear that `dynamic` does not name for a quantized one."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=70, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=128)  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "source")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('base = "int8_wo"\n[[rule]]\nroles = ["mlp.fc1.weight"]\nquant = "none"\n')
    bridge.convert(tmp_path / "source", target="hf", quant=recipe, out=tmp_path / "out", format="gptq", verify=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    linear = {f"bert.encoder.layer.{layer}.intermediate.dense" for layer in range(2)}
    assert linear and all(f"{module}.weight" in stored for module in linear)
    for module in linear:
        assert any(re.match(rule.removeprefix("-:"), module) for rule in section["dynamic"]), module
    assert not any(re.match(rule.removeprefix("-:"), "classifier") for rule in section["dynamic"])
