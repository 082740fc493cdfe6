"""What target `trtllm` refuses before it starts, and what no exporter of others can tell: experts, repeated heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import bridge
from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.core.formats.safetensors import read_header
from bridge.core.values import TensorSpec
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration, Provenance
from bridge.targets.trtllm.lint import lint
from tests.models.sources_made import CONFIG, MadeSource
from tests.oracles.trtllm_oracle import assert_slices
from tests.tables.checkpoints import headers
from tests.test_imports import FRAMEWORKS, loaded

LLAMA = CONFIG | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 256,
    "intermediate_size": 512,
}  # fmt: skip
EXPERTS, FFN = 5, 512


def made(config: dict[str, Any], dtype: str = "float32") -> MadeSource:
    """A checkpoint of random tensors for a config."""
    rng, specs = np.random.default_rng(3), headers(config)
    arrays = {name: rng.normal(size=spec.shape).astype(dtype) for name, spec in specs.items()}
    return MadeSource(arrays, {n: TensorSpec(n, s.shape, dtype) for n, s in specs.items()}, config)


def plan(config: dict[str, Any], quant: Any = "fp8", **options: Any) -> Plan:
    return bridge.plan(made(config), "trtllm", quant, **options)


def ranks(config: dict[str, Any], quant: Any, out: Path, **options: Any) -> list[dict[str, Any]]:
    """The tensors of every rank, as torch reads them."""
    source, calibration = made(config), None
    if quant not in ("int8_wo", "int4_wo", "fp8_pc_pt", "nvfp4_wo"):
        planned = bridge.plan(source, "trtllm", quant, **options)
        modules = {part.module for step in planned.quantized for part in step.inputs}
        found = {module: np.array(4, np.float32) for module in modules}
        calibration = Calibration(Provenance("", "", "", "", "", "", 0, 0), input_amax=found)
    bridge.convert(source, "trtllm", quant, out, calib=calibration, verify=False, **options)
    count = options.get("tp", 1) * options.get("pp", 1)
    return [load_file(out / f"rank{number}.safetensors") for number in range(count)]


def recipe(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("config", "quant", "options", "says"),
    [
        (LLAMA, "fp8", {"tp": 3}, "8 heads cannot be shared evenly by tp=3 ranks"),
        (LLAMA, "fp8", {"tp": 16}, "8 heads cannot be shared evenly by tp=16 ranks"),
        (LLAMA | {"num_key_value_heads": 3}, "fp8", {"tp": 4}, "tp=4 is not a multiple of the 3 heads"),
        (LLAMA | {"intermediate_size": 386}, "fp8", {"tp": 4}, "out = 386 cannot be shared evenly by tp=4 ranks"),
        (LLAMA, "fp8", {"pp": 2}, "pp=2 does not divide the 3 layers; it may be 1, 3"),
        (LLAMA, "int4_wo", {"tp": 2}, "a rank has in = 192, not a multiple of the group of 128; use a smaller tp"),
        (LLAMA | {"intermediate_size": 385}, "fp8_block", {}, "out = 385 does not divide into tiles of 128"),
        (LLAMA | {"rms_norm_eps": None}, "fp8", {}, "the config does not give `rms_norm_eps`"),
        (LLAMA | {"hidden_act": None}, "fp8", {}, "the config does not give `hidden_act`"),
        (MIXTRAL, "nvfp4_wo", {}, "stacked experts have no second scale"),
        (MIXTRAL, "w4a8_awq", {}, "stacked experts have no second scale"),
    ],
)
def test_what_does_not_fit_is_told_before_any_weight_is_read(
    config: dict[str, Any], quant: str, options: dict[str, int], says: str
) -> None:
    with pytest.raises(PlanError) as error:
        plan(config, quant, **options)
    assert says in str(error.value)


def test_odd_rows_cannot_share_a_byte() -> None:
    config = LLAMA | {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 129}
    with pytest.raises(PlanError, match="a rank has out = 129, which is odd: int4 codes of two rows share a byte"):
        plan(config | {"hidden_size": 256}, "int4_wo")


def test_problems_of_all_ranks_and_layers_are_folded_into_one_line_each() -> None:
    with pytest.raises(PlanError) as error:
        plan(LLAMA, "int8_wo", tp=3)
    lines = [line for line in str(error.value).splitlines() if "cannot be shared" in line]
    assert lines == [
        "  transformer.layers.{0..2}.attention.qkv.weight, transformer.layers.{0..2}.attention.dense.weight: "
        "8 heads cannot be shared evenly by tp=3 ranks"
    ]
    assert "has no place" not in str(error.value)


@pytest.mark.parametrize(
    ("quant", "options", "says"),
    [
        ("mxfp4_wo", {}, "TensorRT-LLM's checkpoint up to 1.2 has no such format; use fp8"),
        ("mxfp4_wo", {}, "later versions load target hf (--target hf --for trtllm)"),
        ("nvfp4_awq", {}, "the PyTorch backend has NVFP4_AWQ and loads target hf"),
        ("w4a8_nvfp4_fp8", {}, "only TensorRT-LLM's PyTorch backend has W4A8_NVFP4_FP8, and it loads target hf"),
        ("fp8_block", {"tp": 2}, "fp8_pb_wo scales cannot be cut for tp=2"),
        ("mxfp8", {"tp": 4}, "MXFP8 scales cannot be cut for tp=4"),
    ],
)
def test_a_scheme_without_a_place_in_the_checkpoint_is_refused(quant: str, options: dict[str, int], says: str) -> None:
    with pytest.raises(SchemeError) as error:
        plan(LLAMA, quant, **options)
    assert says in str(error.value)


def test_an_architecture_without_a_layout_is_pointed_to_hf() -> None:
    with pytest.raises(
        PlanError, match=r"no layout of TensorRT-LLM's checkpoint up to 1.2 for Phi3ForCausalLM(.|\n)*target hf"
    ):
        plan(LLAMA | {"architectures": ["Phi3ForCausalLM"]})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 0}, "tp=0 must be a whole number of ranks"),
        ({"pp": True}, "pp=True must be a whole number of ranks"),
        ({"dtype": "fp32"}, "dtype 'fp32' is not a dtype of the checkpoint"),
        ({"tensor_parallel": 2}, "target trtllm has no option 'tensor_parallel'"),
    ],
)
def test_a_wrong_option_is_a_wrong_call(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(LLAMA, "fp8", **options)


def test_kv_in_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="ranks hold one for each layer; use kv='fp8' or 'int8'"):
        bridge.plan(made(LLAMA), "trtllm", "fp8", kv="nvfp4")


def test_one_matrix_has_one_format(tmp_path: Path) -> None:
    quant = recipe(tmp_path / "r.toml", 'base = "fp8"\n\n[[rule]]\nroles = ["attn.q.weight"]\nquant = "int8_wo"\n')
    with pytest.raises(PlanError, match="are one matrix here and need one format; name all in one rule") as told:
        plan(LLAMA, quant)
    assert "  transformer.layers.{0..2}.attention.qkv.weight: model.layers.{}.self_attn.q_proj, " in str(told.value)


def test_stages_must_be_alike_since_one_config_speaks_for_all(tmp_path: Path) -> None:
    quant = recipe(tmp_path / "r.toml", 'base = "fp8"\n\n[[rule]]\nlayers = [0]\nquant = "none"\n')
    with pytest.raises(PlanError, match="pp=3: the stages differ in their quantized modules"):
        plan(LLAMA, quant, pp=3)
    assert plan(LLAMA, quant).quantized


def test_parts_of_one_matrix_have_one_dtype() -> None:
    source = made(LLAMA)
    name = "model.layers.1.self_attn.k_proj.weight"
    specs = dict(source.specs) | {name: TensorSpec(name, source.specs[name].shape, "float16")}
    with pytest.raises(PlanError, match="its parts are float16 and float32; save them in one dtype"):
        bridge.plan(MadeSource(source.arrays, specs, LLAMA), "trtllm", "fp8")


def test_a_padded_head_cannot_be_quantized(tmp_path: Path) -> None:
    quant = recipe(tmp_path / "r.toml", 'base = "int4_wo"\n\n[[rule]]\nroles = ["head.weight"]\nquant = "int4_wo"\n')
    with pytest.raises(PlanError, match="the padded rows of a quantized output head have no scale"):
        plan(LLAMA | {"vocab_size": 90}, quant)


@pytest.mark.slow
def test_a_plan_loads_no_framework() -> None:
    model = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
    assert not loaded(f"import bridge; bridge.plan({str(model)!r}, 'trtllm', 'fp8', tp=2)\nprint()") & FRAMEWORKS


@pytest.mark.parametrize(
    ("quant", "tp"), [("fp8", 4), ("int8_wo", 4), ("fp8_pc_pt", 8), ("int4_wo", 4), ("nvfp4_wo", 2)]
)
def test_ranks_put_together_are_the_checkpoint_of_one_rank(quant: str, tp: int, tmp_path: Path) -> None:
    config = LLAMA | {"intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 1}
    (whole,) = ranks(config, quant, tmp_path / "one")
    assert_slices(whole, ranks(config, quant, tmp_path / "many", tp=tp), heads=8, kv_heads=2)


def test_stages_count_their_layers_from_zero(tmp_path: Path) -> None:
    (whole,) = ranks(LLAMA, "int8_wo", tmp_path / "one")
    stages = ranks(LLAMA, "int8_wo", tmp_path / "three", pp=3)
    for name, tensor in whole.items():
        layer = name.split(".")[2] if ".layers." in name else None
        last = name.startswith(("lm_head", "transformer.ln_f"))
        stage = int(layer) if layer else 2 * last
        assert tensor.equal(stages[stage][name.replace(f"layers.{layer}.", "layers.0.")])
    assert sum(len(stage) for stage in stages) == len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("quant", ["fp8", "int8_wo", "int4_wo"])
def test_experts_are_stacked_as_documented(quant: str, tp: int, tmp_path: Path) -> None:
    """fc is [w3; w1] of every expert and proj is w2: no exporter of others writes it with transformers 5."""
    source, found = made(MIXTRAL), ranks(MIXTRAL, quant, tmp_path / "out", tp=tp)
    for rank, tensors in enumerate(found):
        share = slice(rank * FFN // tp, (rank + 1) * FFN // tp)
        for module in ("fc", "proj"):
            for expert in range(EXPERTS):
                at = f"model.layers.1.block_sparse_moe.experts.{expert}"
                w1, w2, w3 = (source.arrays[f"{at}.w{n}.weight"] for n in (1, 2, 3))
                weight = np.concatenate([w3[share], w1[share]]) if module == "fc" else w2[:, share]
                whole = np.concatenate([w3, w1]) if module == "fc" else w2
                codes, scale = stored(tensors, f"transformer.layers.1.mlp.{module}", expert, quant)
                value, step = decoded(codes, scale, quant)
                assert value.shape == weight.shape
                assert (np.abs(value - weight) <= step * 0.5001 + 1e-7).all()
                if quant == "int8_wo":
                    rows = np.concatenate([whole[share], whole[FFN:][share]]) if module == "fc" else whole
                    assert np.array_equal(scale, np.abs(rows).max(1).astype(np.float32) / np.float32(127))
    assert found[0]["transformer.layers.1.mlp.router.weight"].dtype.is_floating_point
    assert found[0]["transformer.layers.1.mlp.router.weight"].element_size() == 4, "routers stay float32"


def stored(tensors: dict[str, Any], module: str, expert: int, quant: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of one expert as numbers [out, in], and its scales."""
    codes, scale = tensors[f"{module}.weight"][expert], tensors[f"{module}.weights_scaling_factor"][expert].numpy()
    if quant == "fp8":
        assert tensors[f"{module}.activation_scaling_factor"].shape == (1,)
        return codes.float().numpy(), scale
    if quant == "int8_wo":
        return codes.numpy().astype(np.float32), scale
    both = codes.numpy()
    low, high = (both << 4).astype(np.int8) >> 4, both >> 4  # arithmetic shifts: two's complement nibbles
    return np.stack([low, high], 1).reshape(-1, both.shape[1]).astype(np.float32), scale


def decoded(codes: np.ndarray, scale: np.ndarray, quant: str) -> tuple[np.ndarray, np.ndarray]:
    """Values, and the distance between codes there."""
    if quant == "fp8":
        assert scale.shape == (1,)
        value = codes * scale
        return value, np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(codes), 2.0**-6))) - 3), 2.0**-9) * scale
    wide = scale[:, None] if quant == "int8_wo" else scale.repeat(128, axis=1)
    return codes * wide, wide


def test_the_config_of_experts(tmp_path: Path) -> None:
    ranks(MIXTRAL, "int8_wo", tmp_path / "out", tp=2)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["moe"] == {"num_experts": 5, "top_k": 2, "normalization_mode": 1}
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1, "moe_tp_size": 2, "moe_ep_size": 1}
    assert (config["hidden_act"], config["intermediate_size"], config["rank"]) == ("swiglu", FFN, 1)
    assert config["quantization"]["exclude_modules"] == [
        "lm_head",
        *(f"transformer.layers.{n}.mlp.router" for n in range(3)),
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_granite_is_a_mixtral_with_multipliers(tp: int, tmp_path: Path) -> None:
    """TensorRT-LLM builds both as LLaMAForCausalLM; the fields are those of its LLaMAConfig."""
    sizes = {"num_attention_heads": 8, "head_dim": 32, "vocab_size": 80}
    config = MIXTRAL | sizes | {"architectures": ["GraniteMoeForCausalLM"], "num_hidden_layers": 2}
    scales = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    granite = made(config | scales | {"logits_scaling": 6.0})
    mixtral = made(MIXTRAL | sizes | {"num_hidden_layers": 2})
    for name in mixtral.arrays:
        block, _, part = name.partition(".experts.")
        if part:
            expert, which = int(part.split(".")[0]), part.split(".")[1]
            stack = granite.arrays[f"{block}.{'output' if which == 'w2' else 'input'}_linear.weight"][expert]
            mixtral.arrays[name] = {"w1": stack[:FFN], "w2": stack, "w3": stack[FFN:]}[which]
        else:
            mixtral.arrays[name] = granite.arrays[name.replace(".gate.", ".router.layer.")]
    for source, out in ((granite, "granite"), (mixtral, "mixtral")):
        bridge.convert(source, "trtllm", None, tmp_path / out, verify=False, tp=tp)
    for rank in range(tp):
        one, other = (load_file(tmp_path / out / f"rank{rank}.safetensors") for out in ("granite", "mixtral"))
        assert one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())
    told = json.loads((tmp_path / "granite/config.json").read_text())
    assert told["attention_multiplier"] == 0.015625 * 32**0.5, "TensorRT-LLM divides by the root of a head's width"
    assert (told["embedding_multiplier"], told["residual_multiplier"]) == (12.0, 0.22)
    assert told["output_multiplier_scale"] == 1 / 6


def test_granite_without_a_multiplier_has_that_of_transformers(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1, "embedding_multiplier": 12.0}
    granite = made(MIXTRAL | sizes | {"architectures": ["GraniteMoeForCausalLM"]})
    bridge.convert(granite, "trtllm", None, tmp_path / "out")
    told = json.loads((tmp_path / "out/config.json").read_text())
    assert (told["embedding_multiplier"], told["attention_multiplier"]) == (12.0, 32**0.5)


def test_stacked_experts_are_refused_where_they_are_quantized() -> None:
    config = MIXTRAL | {"architectures": ["GraniteMoeForCausalLM"], "num_attention_heads": 8, "head_dim": 32}
    with pytest.raises(SchemeError, match="holds all experts of a layer in one tensor, which is not written quantized"):
        plan(config, "int8_wo")


def test_a_rank_may_hold_padding_only(tmp_path: Path) -> None:
    config = LLAMA | {"vocab_size": 65, "num_hidden_layers": 1, "intermediate_size": 1024, "head_dim": 128}
    found = ranks(config, "int4_wo", tmp_path / "out", tp=8)
    assert [part["lm_head.weight"].shape for part in found] == [(16, 128)] * 8
    assert not any(part["lm_head.weight"].any() for part in found[5:])
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 128


def test_an_unquantized_checkpoint_says_so(tmp_path: Path) -> None:
    (tensors,) = ranks_plain(tmp_path / "out")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float16"}
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization"] == {
        "quant_algo": None, "kv_cache_quant_algo": None,
    }  # fmt: skip


def ranks_plain(out: Path) -> list[dict[str, Any]]:
    bridge.convert(made(LLAMA), "trtllm", None, out, verify=False)
    return [load_file(out / "rank0.safetensors")]


def test_what_was_written_is_compared_with_its_source(tmp_path: Path) -> None:
    report = bridge.convert(made(LLAMA, "float16"), "trtllm", "int8_wo", tmp_path / "out", tp=2)
    assert report.parity is not None
    assert len(report.parity.tensors) == 2 * 5 * 3  # ranks, matrices, layers
    assert all(tensor.passed for tensor in report.parity.tensors)
    assert report.parity.outputs == (), "it cannot be run here"


@pytest.mark.parametrize("scheme", ["fp8_pc_pt", "int8_wo", "int4_wo", "nvfp4_wo", "mxfp8", "fp8_block"])
def test_lint_finds_nothing_in_what_is_written_and_every_harm(scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(made(LLAMA | {"num_key_value_heads": 4}), "trtllm", scheme, out, verify=False)
    assert lint(out) == []
    config = json.loads((out / "config.json").read_text())
    harms = {
        "no architecture": {key: value for key, value in config.items() if key != "architecture"},
        "unknown to TensorRT-LLM": {**config, "quantization": {**config["quantization"], "block": 1}},
        "world_size is 2": {**config, "mapping": {"world_size": 2}},
        "is not quantized": {**config, "quantization": {"quant_algo": None}},
        "has weights in": {**config, "quantization": {"quant_algo": "W4A16_NVFP4" if scheme != "nvfp4_wo" else "FP8"}},
    }
    for said, harmed in harms.items():
        (out / "config.json").write_text(json.dumps(harmed))
        assert any(said in finding for finding in lint(out)), said


def test_lint_sees_a_factor_that_is_gone_or_zero(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(made(LLAMA), "trtllm", "int8_wo", out, verify=False)
    rank = out / "rank0.safetensors"
    whole = rank.read_bytes()
    rank.write_bytes(
        whole.replace(b"layers.0.mlp.fc.weights_scaling_factor", b"layers.0.mlp.fc.weights_scaling_fact0r")
    )
    assert any("needs weights_scaling_factor" in finding for finding in lint(out))
    entry = read_header(rank).entries["transformer.layers.1.mlp.fc.weights_scaling_factor"]
    rank.write_bytes(whole[: entry.offset] + b"\0" * 4 + whole[entry.offset + 4 :])
    assert any("layers.1.mlp.fc" in finding and "positive" in finding for finding in lint(out))
