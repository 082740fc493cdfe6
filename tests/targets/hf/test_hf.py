"""Target `hf`: what is planned, refused and written beside the weights, against the libraries that read it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save

import bridge
from bridge.core.errors import PlanError, UsageError
from bridge.core.formats.safetensors import SafetensorsFile, layout
from bridge.core.text import byte_count
from bridge.core.values import Format, Site, Slice, TensorSpec
from bridge.planning.plan import Output, Plan, Step
from bridge.quant.schemes.load import load_scheme
from bridge.targets.config_json import config_json, generation_config
from bridge.targets.hf import modelopt
from bridge.targets.hf.lint import lint
from bridge.targets.hf.shards import divide, index
from bridge.targets.hf.spelling import SPELLINGS, Spelling, spelling
from bridge.targets.modelopt_format import routers, summarize
from tests.models.export_families import build, tokens
from tests.needs import Lazy
from tests.oracles import export_oracle as oracle

convert_hf_config = Lazy("modelopt.torch.export.convert_hf_config")
hf_checkpoint_utils = Lazy("modelopt.torch.export.plugins.hf_checkpoint_utils")
quant_utils = Lazy("modelopt.torch.export.quant_utils")

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
# scheme -> what ModelOpt calls the format of a module
KINDS = {
    "fp8": "fp8", "fp8_pc_pt": "fp8_pc_pt", "fp8_block": "fp8_pb_wo", "int8_sq": "int8_sq", "int8_wo": "int8_wo",
    "int4_wo": "int4_awq", "w4a8_awq": "w4a8_awq", "nvfp4_wo": "w4a16_nvfp4", "nvfp4": "nvfp4", "mxfp8": "mxfp8",
    "w4a8_nvfp4_fp8": "w4a8_nvfp4_fp8", "nvfp4_awq": "nvfp4_awq",
}  # fmt: skip
BLOCKS = {
    "int4_wo": 128,
    "w4a8_awq": 128,
    "nvfp4_wo": 16,
    "nvfp4": 16,
    "mxfp8": 32,
    "fp8_block": 128,
    "w4a8_nvfp4_fp8": 32,
    "nvfp4_awq": 16,
}


def made(layers: dict[str, Format], kept: tuple[str, ...] = (), kv: bool = False) -> Plan:
    """A plan of empty steps: which modules are quantized how, and which are kept."""
    steps = [Step((Slice(f"{m}.weight"),), (), Site(m, f"{m}.weight", "out_in"), f) for m, f in layers.items()]
    steps += [Step((Slice(f"{m}.weight"),), (), Site(m, f"{m}.weight", "out_in")) for m in kept]
    if kv:
        steps.append(Step((), (Output(TensorSpec("k", (), "float32"), "k_scale", ""),), attention="a"))
    sources = {f"{m}.weight": TensorSpec(f"{m}.weight", (4, 4), "bfloat16") for m in (*layers, *kept)}
    return Plan("A", "hf", "s", "", {}, sources, tuple(steps))


def test_excluded_modules_are_shortened_as_modelopt_shortens_them() -> None:
    generator = random.Random(7)
    parts = ["layers", "0", "1", "10", "mlp", "mlp_norm", "gate", "gate_proj", "attn", "lm_head", "embed"]
    for _ in range(400):
        names = {".".join(generator.choices(parts, k=generator.randint(1, 5))) for _ in range(12)}
        kept = generator.sample(sorted(names), 5)
        quantized = sorted(names - set(kept))
        assert summarize(kept, quantized) == sorted(
            quant_utils._prefix_wildcard_summarize_exclude_modules(kept, quantized)
        )


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize(
    "schemes",
    [(s,) for s in KINDS]
    + [("fp8", "nvfp4"), ("w4a8_awq", "fp8_block", "int8_wo"), ("fp8", "nvfp4_awq"), ("fp8", "w4a8_nvfp4_fp8"), ()],
)
def test_both_configs_say_what_modelopt_says(schemes: tuple[str, ...], kv: bool) -> None:
    layers = {f"model.layers.{n}.mlp": load_scheme(s).format for n, s in enumerate((*schemes, *schemes))}
    theirs: dict[str, Any] = {}
    for module, scheme in zip(layers, (*schemes, *schemes), strict=True):
        theirs |= {f"{module}.quantization": KINDS[scheme], f"{module}.awq_block_size": BLOCKS.get(scheme, 0)}
    theirs |= {"lm_head.quantization": None, "lm_head.awq_block_size": 0}
    inner = {"quant_algo": None, "kv_cache_quant_algo": None, **quant_utils.process_layer_quant_config(theirs)}
    inner["kv_cache_quant_algo"] = "FP8" if kv else None
    expected = {"producer": modelopt.PRODUCER, "quantization": inner}
    ours = modelopt.hf_quant_config(made(layers, ("lm_head",), kv))
    if not schemes and not kv:
        assert ours == {}
        return
    assert json.dumps(ours) == json.dumps(expected)
    assert json.dumps(modelopt.quantization_config(ours)) == json.dumps(
        convert_hf_config.convert_hf_quant_config_format(expected)
    )


def test_every_format_has_one_name_and_the_rest_is_refused() -> None:
    assert {modelopt.setting(load_scheme(s).format)["quant_algo"] for s in KINDS} <= set(modelopt_names())
    alone = Format(load_scheme("fp8").weight)  # FP8 weights without input scales: no runtime reads that
    assert "no algorithm for weights in fp8 per tensor with unquantized inputs" in modelopt.why_unsupported(alone)
    assert all(not modelopt.why_unsupported(load_scheme(s).format) for s in KINDS)


def modelopt_names() -> list[str]:
    return [*(name for name, _ in modelopt.ALGORITHMS.values()), "NVFP4_AWQ"]


@pytest.mark.parametrize("limit", ["1KB", "4KB", "9KB", "1MB"])
def test_shards_and_index_are_those_of_the_hub_library(limit: str) -> None:
    generator = random.Random(3)
    shapes = {f"t{n}": (generator.randint(1, 40), generator.randint(1, 40)) for n in range(30)}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    theirs = split_torch_state_dict_into_shards(
        {name: torch.zeros(shape) for name, shape in shapes.items()},
        max_shard_size=limit,
        filename_pattern="model{suffix}.safetensors",
    )
    ours = divide(specs, byte_count(limit))
    assert ours == theirs.tensor_to_filename
    files = {file: [s for s in specs if ours[s.name] == file] for file in theirs.filename_to_tensors}
    said = {"metadata": {"total_parameters": 7, **theirs.metadata}, "weight_map": ours}
    assert index(files, {"total_parameters": 7}).decode() == json.dumps(said, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "0", "10 apples"])
def test_a_shard_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match=r"shard_size .* is not a size; write 2GB, 512MiB or a number of bytes"):
        byte_count(size, "shard_size")


def test_files_are_laid_out_as_the_safetensors_library_does() -> None:
    names = [
        "uint8",
        "int8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "int32",
        "float32",
        "int64",
        "bool",
    ]
    tensors = {f"{p}.{n}": torch.zeros(3, dtype=getattr(torch, n)) for p in ("b", "a") for n in names}
    specs = [TensorSpec(name, (3,), name.split(".")[1]) for name in tensors]
    header, _, size = layout(specs, {"format": "pt"}, 8)
    theirs = save(tensors, metadata={"format": "pt"})
    assert (header, size) == (theirs[: len(header)], len(theirs))


@pytest.mark.parametrize("rope", ["rope_scaling", "rope_parameters"])
def test_config_is_repaired_as_modelopt_repairs_it(rope: str) -> None:
    config = {
        "z": "kept in this order", "rope_theta": 5e5, rope: {"rope_type": "llama3", "factor": 8.0},
        "num_hidden_layers": 2, "layer_types": ["full", "full", "draft"], "num_nextn_predict_layers": 1, "a": "é",
    }  # fmt: skip
    expected = json.loads(json.dumps(config))
    with pytest.warns(UserWarning, match="Trimming"):
        hf_checkpoint_utils.sanitize_hf_config_for_deployment(expected, None)
    expected["quantization_config"] = {"quant_method": "modelopt"}
    assert config_json(config, {"quant_method": "modelopt"}, False).decode() == json.dumps(expected, indent=4)


@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "do_sample": True}, {"max_length": 9}])
def test_a_generation_config_that_samples_says_so(given: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.GenerationConfig(**given, transformers_version="5.0")
    before = config.to_json_string().encode()
    if "top_k" in given or "top_p" in given:
        config.do_sample = True
    assert generation_config(before).decode() == config.to_json_string()


def test_routers_stand_next_to_experts() -> None:
    names = ["a.gate.weight", "a.experts.0.up.weight", "b.gate.weight", "a.gate.bias", "a.shared_expert_gate.weight"]
    assert routers(names) == {"a.gate", "a.shared_expert_gate"}


# Planning


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_every_spelling_has_what_the_target_asks(spelled: str) -> None:
    found = spelling(spelled)
    needed = [name for name in vars(Spelling) if not name.startswith("_")]
    assert len(needed) == 10
    assert all(callable(getattr(found, name)) for name in needed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "model-opt"}, "format 'model-opt' is unknown; .*nearest: modelopt"),
        ({"dtype": "fp8"}, "dtype 'fp8' is not a dtype"),
        ({"dtype": "int8"}, "dtype 'int8' is not a dtype that weights can be rounded to; use fp32, fp16 or bf16"),
        ({"shard_size": "ten"}, "shard_size 'ten' is not a size"),
        ({"shards": 3}, "target hf has no option 'shards'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bridge.plan(TINY, "hf", "fp8", **options)


def test_kv_in_int8_is_refused_with_what_to_use() -> None:
    with pytest.raises(
        PlanError, match="KV cache: unified checkpoints hold KV scales of FP8 only, not of int8 per tensor"
    ):
        bridge.plan(TINY, "hf", "fp8", kv="int8")


def write_llama(root: Path, **changed: int) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        **{"hidden_size": 128, "intermediate_size": 256, **changed},
    )  # fmt: skip
    return oracle.save(transformers.LlamaForCausalLM(config).to(torch.bfloat16), root)


def test_blocks_that_do_not_divide_are_one_error_with_all_modules(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "m", intermediate_size=200)
    with pytest.raises(PlanError) as caught:
        bridge.plan(directory, "hf", "int4_wo")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  model.layers.{0..1}.mlp.down_proj: in = 200 does not divide into blocks of 128")
    assert 'quant = "none"' in lines[1]


def test_tiles_across_gate_and_up_of_an_expert_are_refused(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=128, intermediate_size=200, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    directory = oracle.save(transformers.MixtralForCausalLM(config).to(torch.bfloat16), tmp_path / "m")
    with pytest.raises(PlanError, match="out = 200 is not a multiple of 128: a tile would span gate and up"):
        bridge.plan(directory, "hf", "fp8_block")


def test_matrices_that_runtimes_fuse_must_have_one_scheme(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "fp8"\n[[rule]]\nroles = ["attn.q.weight"]\nquant = "int8_wo"\n')
    with pytest.raises(PlanError, match=r"{0\.\.4}.self_attn.q_proj: reads the same input as .*k_proj.*v_proj"):
        bridge.plan(TINY, "hf", recipe)


def test_a_convolution_is_kept_and_told_so() -> None:
    from bridge.targets.hf import TARGET

    assert "convolution" in TARGET.why_kept(load_scheme("fp8").format, Site("c", "c.weight", "conv"))


def test_tensors_follow_the_order_of_the_modules() -> None:
    plan = bridge.plan(TINY, "hf", "fp8", kv="fp8", shard_size="200KB")
    order = [name for specs in sorted(plan.files.items()) for name in sorted(spec.name for spec in specs[1])]
    assert len(plan.files) > 3 and len(order) == len(plan.outputs)
    first = sorted(spec.name for spec in plan.files[f"model-00002-of-{len(plan.files):05d}.safetensors"])
    assert first[0].startswith("model.layers.0.")


# Whole conversions


DATA_FREE = ("fp8_pc_pt", "fp8_block", "int8_wo", "int4_wo", "nvfp4_wo", "mxfp8", "mxfp4_wo")
FRAMEWORKS = ("torch", "transformers", "modelopt", "ml_dtypes", "safetensors", "onnx", "onnxruntime")
ALONE = """
import sys
import bridge
for quant, calib in {runs!r}:
    bridge.convert({model!r}, "hf", quant, {out!r} + quant, calib=calib, verify=False)
print(sorted(set({frameworks!r}) & set(sys.modules)))
"""


@pytest.mark.slow
def test_the_data_free_path_and_a_saved_calibration_load_no_framework(tmp_path: Path) -> None:
    directory = oracle.save(build("qwen3"), tmp_path / "source")
    calibration = tmp_path / "awq.safetensors"
    bridge.calibrate(directory, "int4_awq", tokens()).save(calibration)
    runs = [(quant, None) for quant in DATA_FREE] + [("int4_awq", str(calibration))]
    code = ALONE.format(runs=runs, model=str(directory), out=f"{tmp_path}/", frameworks=FRAMEWORKS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int8_wo", pytest.param("int4_awq", marks=pytest.mark.product), None])
def test_a_converted_model_is_proved_and_answers_like_its_source(scheme: str | None, tmp_path: Path) -> None:
    few = {"samples": 16, "sequence": 128} if scheme in ("fp8", "int4_awq") else {}
    report = bridge.convert(TINY, "hf", scheme, tmp_path / "out", dtype="bf16" if scheme else None, **few)
    assert report.passed and not report.findings
    again = bridge.verify(tmp_path / "out", TINY)
    assert again.passed and again.parity
    assert again.parity.outputs[0].cosine > 0.98
    mine, source = ({path.name for path in root.iterdir()} for root in (tmp_path / "out", TINY))
    assert source <= mine  # tokenizer, chat template and all else beside the weights
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in said) == (scheme is not None)


@pytest.mark.slow
def test_nvfp4_has_the_weights_of_its_weight_only_scheme_and_scales_of_inputs(tmp_path: Path) -> None:
    directory = oracle.save(build("llama"), tmp_path / "source")
    answer = oracle.calibrated(directory, "fp8", None, tokens())  # the same statistics: NVFP4's need a GPU in ModelOpt
    ours = oracle.convert(directory, "nvfp4", None, answer, tmp_path / "ours", None)
    alone = oracle.convert(directory, "nvfp4_wo", None, answer, tmp_path / "alone", None)
    mine, other = (SafetensorsFile(root / "model.safetensors") for root in (ours, alone))
    scales = {name for name in mine.specs if name.endswith(".input_scale")}
    assert len(scales) == 14 and mine.specs.keys() - scales == other.specs.keys()
    assert all(mine.read(name).tobytes() == other.read(name).tobytes() for name in other.specs)
    for name in scales:
        amax = answer.calibration.input_amax[name.removesuffix(".input_scale")]
        assert float(mine.read(name)) == pytest.approx(float(amax) / (6 * 448), rel=1e-7)
    assert json.loads((ours / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    assert lint(ours) == []


def test_an_unquantized_conversion_has_the_tensors_of_its_source(tmp_path: Path) -> None:
    bridge.convert(TINY, "hf", None, tmp_path / "out", verify=False)
    ours, source = (SafetensorsFile(root / "model.safetensors") for root in (tmp_path / "out", TINY))
    assert ours.specs.keys() == source.specs.keys()
    assert all(ours.read(name).tobytes() == source.read(name).tobytes() for name in ours.specs)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size


@pytest.mark.parametrize(("of", "dtype"), [("float32", "float16"), ("bfloat16", "float32"), ("float64", "bfloat16")])
def test_the_dtype_is_that_of_unquantized_tensors_and_of_the_config(of: str, dtype: str, tmp_path: Path) -> None:
    """Values as torch rounds them; a tensor with another dtype than the model's keeps it, and the plan says so."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY).to(getattr(torch, of))
    apart = ["model.norm.weight"] if of == "float32" else []
    model.model.norm.to(torch.bfloat16 if apart else model.dtype)
    report = bridge.convert(model, "hf", None, tmp_path / "out", dtype=dtype, verify=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in model.state_dict().items():
        expected = value if name in apart else value.to(getattr(torch, dtype))
        assert written[name].dtype == expected.dtype and written[name].equal(expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    stays = [note for note in report.notes if "stays bfloat16, unlike the rest of the model" in note]
    assert len(stays) == len(apart) and all(note.startswith(apart[0]) for note in stays)


def test_a_scheme_takes_no_matrices_in_float64(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY).double()
    for dtype in (None, "fp32"):
        with pytest.raises(
            bridge.BridgeError, match=r"in float64, which no scheme quantizes; convert the .* dtype='fp32'"
        ):
            bridge.plan(model, "hf", "int8_wo", dtype=dtype)
    bridge.convert(model, "hf", None, tmp_path / "single", dtype="fp32", verify=False)
    assert bridge.plan(tmp_path / "single", "hf", "int8_wo").quantized


def test_the_dtype_is_also_that_of_scales_and_norms_beside_codes() -> None:
    for form, scheme, part in (("compressed-tensors", "int8_wo", "scale"), ("modelopt", "int4_awq", "pre_quant_scale")):
        outputs = bridge.plan(TINY, "hf", scheme, format=form, dtype="fp16").outputs
        dtypes = {output.spec.dtype for output in outputs if output.part == part or "norm" in output.spec.name}
        assert dtypes == {"float16"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_awq", "int8_sq"])
def test_a_model_in_memory_and_its_directory_give_the_same_files(scheme: str, tmp_path: Path) -> None:
    directory = oracle.save(build("qwen3"), tmp_path / "source")
    model = oracle.load(directory)
    bridge.convert(model, "hf", scheme, tmp_path / "memory", calib=[*tokens(), tokens()[0]], verify=False)
    calibration = tmp_path / "memory" / "bridge" / "calibration.safetensors"
    bridge.convert(directory, "hf", scheme, tmp_path / "disk", calib=calibration, verify=False)
    assert len(list((tmp_path / "disk").glob("model*.safetensors"))) == 1
    for name in ("model.safetensors", "hf_quant_config.json", "config.json", "generation_config.json"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes(), name


# Structures whose groups are unknown


def jetmoe() -> Any:
    """It does not run on fake tensors, so that nobody knows who reads one input."""
    config = transformers.JetMoeConfig(
        vocab_size=330, hidden_size=256, num_hidden_layers=2, num_key_value_heads=4, kv_channels=64,
        intermediate_size=384, num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.JetMoeForCausalLM(config)


def with_routers(scheme: str, directory: Path) -> Path:
    """A recipe that quantizes its routers, too: kv_proj, alone in its layer, shares no scales."""
    recipe = directory / f"{scheme}.toml"
    rule = f'[[rule]]\nmodules = ["*router.layer"]\nquant = "{scheme}"\noverride = true\n'
    recipe.write_text(f'base = "{scheme}"\n{rule}')
    return recipe


@pytest.mark.parametrize("scheme", ["int8_sq", "int4_awq", "w4a8_awq", "nvfp4_wo", "nvfp4"])
def test_schemes_that_share_scales_are_refused_where_groups_are_unknown(scheme: str, tmp_path: Path) -> None:
    words = (
        r"shares scales with the modules that read the same input, which are unknown: JetMoe(.|\n)*use fp8, fp8_pc_pt"
    )
    with pytest.raises(PlanError, match=words):
        bridge.plan(jetmoe(), "hf", with_routers(scheme, tmp_path))


@pytest.mark.parametrize("scheme", ["int4_awq", "nvfp4_wo"])
def test_the_only_matrix_of_a_layer_shares_no_scales(scheme: str) -> None:
    names = {step.matrix for step in bridge.plan(jetmoe(), "hf", scheme).quantized}
    assert names == {f"model.layers.{layer}.self_attention.kv_proj" for layer in (0, 1)}


def test_schemes_that_share_nothing_say_that_groups_are_unknown(tmp_path: Path) -> None:
    for scheme, options in (("fp8", {}), ("int8_wo", {}), ("fp8", {"format": "compressed-tensors"})):
        notes = bridge.plan(jetmoe(), "hf", with_routers(scheme, tmp_path), **options).notes
        assert notes[0].startswith("unknown which modules read the same input: JetMoe")
