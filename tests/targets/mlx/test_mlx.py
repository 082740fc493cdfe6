"""Target `mlx` against mlx-lm: bytes of mlx_lm.convert, logits and weights of what mlx-lm loads, refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import bridge
from bridge.core.errors import CannotRun, PlanError, SchemeError, UsageError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from bridge.streaming.written import OutputReader
from bridge.tables.dialects.dialect import load_dialect
from bridge.targets import load_target
from bridge.targets.manifest import load_manifest
from bridge.targets.mlx.config import classes
from bridge.verification.tensors import tensor_parity
from tests.blocks import ROOT
from tests.models.gguf_families import FAMILIES, save
from tests.oracles import mlx_process
from tests.targets.test_gptq import calibration

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
needs_mlx = pytest.mark.skipif(not mlx_process.has_mlx(), reason="make oracles")
# Family -> the largest difference of a logit in float32. sic: mlx-lm's gemma has another gelu, and its gemma3
# multiplies embeddings by the root of their width in bfloat16.
WRITTEN = {
    "llama": 1e-4, "mistral": 1e-4, "qwen2": 1e-4, "qwen3": 1e-4, "gemma": 4e-3, "gemma2": 1e-4, "gemma3": 0.05,
    "mixtral": 1e-4, "qwen3moe": 1e-4,
}  # fmt: skip
CHANGED: dict[str, dict[str, Any]] = {"mixtral": {"head_dim": 32}}
# mlx-lm's class ends at a config of transformers 5, which has neither `rope_theta` nor `num_experts`.
NOT_CONVERTED = ("qwen3moe",)
IDS = np.random.default_rng(3).integers(3, 300, (2, 15))
ROUTERS = ".gate."  # mlx_lm.convert quantizes routers; none of our schemes does
# What we write beside mlx_lm.convert's config: without it, mlx-lm turns with its own defaults, whatever the model says.
ROTARY = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family."""
    place = tmp_path_factory.mktemp("families")
    return {family: save(family, place / family, **CHANGED.get(family, {})) for family in WRITTEN}


@pytest.fixture(scope="module")
def converted(models: dict[str, Path]) -> dict[str, Path]:
    """What mlx_lm.convert makes of each, those apart that it ends at."""
    sources = [directory for family, directory in models.items() if family not in NOT_CONVERTED]
    mlx_process.run("convert", 4, *sources)
    return {directory.name: Path(f"{directory}-mlx") for directory in sources}


@pytest.fixture(scope="module")
def logits(models: dict[str, Path]) -> dict[str, Any]:
    """Logits of each in mlx-lm, unquantized. Texts fit the window of 16, which mlx-lm's gemma2 does not have."""
    place = models["llama"].parent
    np.save(place / "ids.npy", IDS)
    outs = [place / f"{family}-plain" for family in models]
    for source, out in zip(models.values(), outs, strict=True):
        assert bridge.convert(source, "mlx", None, out).passed
    mlx_process.run("run", place / "ids.npy", *outs)
    return {family: np.load(f"{out}.npz")["logits"] for family, out in zip(models, outs, strict=True)}


def as_dtype(source: Path, dtype: str, out: Path) -> Path:
    """A copy of a model in another dtype."""
    out.mkdir()
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
    (out / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file as save_torch

    save_torch(
        {name: torch.from_numpy(t).to(getattr(torch, dtype)) for name, t in tensors.items()}, out / "model.safetensors"
    )
    return out


def compared(ours: Path, theirs: Path) -> list[str]:
    """The tensors of one of two checkpoints that the other lacks, or has otherwise."""
    one, two = (SafetensorsFile(path / "model.safetensors") for path in (ours, theirs))
    both = one.specs.keys() & two.specs.keys()
    same = {n for n in both if one.specs[n] == two.specs[n] and one.read(n).tobytes() == two.read(n).tobytes()}
    return sorted((one.specs.keys() | two.specs.keys()) - same)


def test_every_architecture_with_a_layout_has_a_class() -> None:
    assert classes().keys() == load_dialect("mlx").architectures.keys()
    assert {FAMILIES[family][0] for family in WRITTEN} == classes().keys()


@pytest.mark.slow
@needs_mlx
@pytest.mark.parametrize("family", [family for family in WRITTEN if family not in NOT_CONVERTED])
def test_tensors_are_those_of_mlx_lm_convert(
    family: str, models: dict[str, Path], converted: dict[str, Path], tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", converted[family]
    report = bridge.convert(models[family], "mlx", "affine4", ours)
    assert report.passed and not report.findings
    different = compared(ours, theirs)
    assert all(ROUTERS in name for name in different) and bool(different) == (family == "mixtral")
    configs = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
    assert {name: value for name, value in configs[0].items() if name not in ROTARY} == configs[1]
    assert list(configs[0]) == sorted(configs[0])
    index = "model.safetensors.index.json"
    if not different:
        assert json.loads((ours / index).read_text()) == json.loads((theirs / index).read_text())


@pytest.mark.slow
@needs_mlx
@pytest.mark.parametrize(("dtype", "bits"), [("float16", 3), ("bfloat16", 6)])
def test_half_precision_is_converted_alike(dtype: str, bits: int, models: dict[str, Path], tmp_path: Path) -> None:
    source = as_dtype(models["qwen3"], dtype, tmp_path / "source")
    assert bridge.convert(source, "mlx", f"affine{bits}", tmp_path / "ours").passed
    mlx_process.run("convert", bits, source)
    assert not compared(tmp_path / "ours", tmp_path / "source-mlx")


@pytest.mark.slow
@needs_mlx
@pytest.mark.parametrize("family", list(WRITTEN))
def test_mlx_lm_computes_the_source_in_float32(family: str, models: dict[str, Path], logits: dict[str, Any]) -> None:
    cls = getattr(transformers, FAMILIES[family][0])
    model = cls.from_pretrained(models[family], dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor(IDS)).logits.numpy()
    assert np.abs(logits[family] - expected).max() < WRITTEN[family]


def dequantized(out: Path) -> dict[str, np.ndarray]:
    """The weights of an output by module, as our own decoder reads them."""
    from bridge.quant.codec.decode import decode

    plan = load_manifest(out).plan
    reader, found = OutputReader(plan, out), {}
    for step in plan.quantized:
        assert step.format
        parts = {("codes" if o.part == "weight" else o.part): reader.read(o) for o in step.outputs}
        *before, groups = next(o.spec.shape for o in step.outputs if o.part == "scale")
        width = groups * step.format.weight[0].block[0]
        rows = int(np.prod(before))
        values = decode(parts, step.format.weight, (rows, width), coding=step.coding)
        found[step.outputs[0].spec.name.removesuffix(".weight")] = values.reshape(*before, width)
    return found


SCHEMES = (
    "affine2", "affine3", "affine5", "affine6", "affine8", "int4_wo", "int4:rtn", "int4:gptq", "q8_0", "mxfp4_wo",
    "mxfp8_wo",
)  # fmt: skip


@pytest.mark.slow
@needs_mlx
def test_mlx_reads_the_weights_that_we_read(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20)[None] + 5)
    outs = []
    for number, scheme in enumerate(SCHEMES):
        calib = calibration(scheme) if load_scheme(scheme).needs_calibration else None
        outs.append(tmp_path / f"out{number}")
        # products of codes and scales of 8 bits are exact in float32, in which mlx rounds them before it adds the bias
        report = bridge.convert(LLAMA, "mlx", scheme, outs[-1], calib=calib, dtype="bf16")
        assert report.passed and not report.findings
    mlx_process.run("run", tmp_path / "ids.npy", *outs)
    for scheme, out in zip(SCHEMES, outs, strict=True):
        theirs, ours = dict(np.load(f"{out}.npz")), dequantized(out)
        logits = theirs.pop("logits")
        assert theirs.keys() == ours.keys() and np.isfinite(logits).all(), scheme
        for module, values in theirs.items():
            assert np.array_equal(values, ours[module]), (scheme, module)


@pytest.mark.slow
@needs_mlx
def test_modules_may_have_modes_of_their_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    rules = [("*.v_proj", "affine6"), ("*.down_proj", "mxfp8_wo"), ("*.k_proj", "none"), ("lm_head", "affine8")]
    text = "".join(f'[[rule]]\nmodules = ["{glob}"]\nquant = "{quant}"\n' for glob, quant in rules)
    recipe.write_text(f'base = "affine4"\n{text}')
    assert bridge.convert(LLAMA, "mlx", recipe, tmp_path / "out").passed
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (config["bits"], config["group_size"], config["mode"]) == (4, 64, "affine")
    assert config["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    assert config["lm_head"]["bits"] == 8 and "model.layers.0.self_attn.k_proj" not in config
    np.save(tmp_path / "ids.npy", np.arange(20)[None] + 5)
    mlx_process.run("run", tmp_path / "ids.npy", tmp_path / "out")
    theirs, ours = np.load(tmp_path / "out.npz"), dequantized(tmp_path / "out")
    assert all(np.array_equal(theirs[module], values) for module, values in ours.items())


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("nvfp4_wo", "mlx-lm's Linear has no scale above those of blocks; use mxfp4_wo or affine4"),
        ("fp8", "mlx-lm computes with unquantized inputs; use affine8"),
        ("mxfp8", "mlx-lm computes with unquantized inputs; use mxfp8_wo"),
        ("int8_wo", "MLX has no mode for int8 in a scale per channel; use affine8"),
        ("int4_awq", "mlx-lm divides no input by a pre-scale, as awq needs; use int4:gptq or affine4"),
        ("q4_k", "MLX has no mode for q4_k in blocks of 256"),
    ],
)
def test_formats_that_mlx_lacks_are_refused(scheme: str, message: str) -> None:
    with pytest.raises((PlanError, SchemeError)) as error:
        bridge.plan(LLAMA, "mlx", scheme)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; mlx-lm's llama computes silu"),
        ("mixtral", {}, "heads * head_dim is not hidden, which mlx-lm's mixtral wants; take target hf or trt"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' is not",
        ),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is null; mlx-lm's gemma2 caps logits"),
        ("gemma", {"tie_word_embeddings": False}, "the head is not the embedding (tie_word_embeddings is false)"),
        ("phi3", {}, "mappings/dialects/mlx.toml has no layout for Phi3ForCausalLM"),
    ],
)
def test_models_that_mlx_lm_would_compute_otherwise_are_refused(
    family: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as error:
        bridge.plan(save(family, tmp_path / family, **changed), "mlx", "affine4")
    assert message in str(error.value)


def test_a_window_that_mlx_lm_has_not_is_told(tmp_path: Path) -> None:
    plan = bridge.plan(save("mistral", tmp_path / "m", sliding_window=16), "mlx", "affine4")
    assert "attention has a window of 16; mlx-lm's llama attends to every token, so longer prompts differ" in plan.notes


def test_the_vocabulary_stays_as_it_is_on_request(tmp_path: Path) -> None:
    plan = bridge.plan(LLAMA, "mlx", "affine4", vocabulary="keep")
    kept = {output.spec.name: output.spec.dtype for output in plan.outputs}
    assert kept["lm_head.weight"] == kept["model.embed_tokens.weight"] == "float32"
    assert kept["model.layers.0.mlp.up_proj.weight"] == "uint32"


def test_rows_that_groups_do_not_divide_stay_as_they_are(tmp_path: Path) -> None:
    plan = bridge.plan(save("llama", tmp_path / "m", intermediate_size=352), "mlx", "affine4")
    dtypes = {output.spec.name: output.spec.dtype for output in plan.outputs}
    assert dtypes["model.layers.0.mlp.down_proj.weight"] == "float32"
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == "uint32"
    assert any("in = 352 is no multiple of the group of 64, so it stays unquantized" in note for note in plan.notes)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
@pytest.mark.parametrize("scheme", ["affine4", "int4:rtn"])
def test_verification_finds_a_changed_bit(part: str, scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(LLAMA, "mlx", scheme, out, verify=False)
    manifest, source = load_manifest(out), open_source(LLAMA)
    before = tensor_parity(manifest.plan, source, manifest.gates, out)
    tensors = load_file(out / "model.safetensors")
    name = f"model.layers.1.self_attn.q_proj.{part}"
    tensors[name].view(np.uint32)[3, 0] ^= np.uint32(1)
    save_file(tensors, out / "model.safetensors")
    after = tensor_parity(manifest.plan, source, manifest.gates, out)
    assert before.passed and [row.name for row in after.tensors if not row.passed] == [
        "model.layers.1.self_attn.q_proj.weight"
    ]


def test_lint_finds_what_mlx_lm_would_not_load(tmp_path: Path) -> None:
    out, target = tmp_path / "out", load_target("mlx")
    bridge.convert(LLAMA, "mlx", "affine4", out, verify=False)
    plan = load_manifest(out).plan
    assert not target.lint(out, plan)
    tensors = load_file(out / "model.safetensors")
    del tensors["lm_head.biases"]
    save_file(tensors, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["quantization"] = config["quantization"] | {"bits": 3}
    (out / "config.json").write_text(json.dumps(config))
    found = "\n".join(target.lint(out, plan))
    assert "lm_head is affine, and lm_head.biases is missing" in found
    assert "not 3-bit codes in groups of 64" in found and "differ; mlx-lm writes one value for both" in found


def test_running_without_mlx_lm_says_what_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("mlx_lm"):
        pytest.skip("mlx-lm is installed here")
    with pytest.raises(CannotRun, match=r"needs mlx-lm: pip install mlx-lm on a Mac, 'mlx-lm\[cpu\]' elsewhere"):
        load_target("mlx").runtime(tmp_path)


def test_an_unknown_way_with_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match=r"vocabulary='drop' \(--vocabulary\): use keep or quantize"):
        bridge.plan(LLAMA, "mlx", "affine4", vocabulary="drop")


def test_a_quantized_source_is_copied_and_its_vocabulary_stays(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int4_wo", tmp_path / "gptq", format="gptq", verify=False, progress=False)
    plan = bridge.plan(tmp_path / "gptq", "mlx")
    assert plan.quantized and not {"model.embed_tokens", "lm_head"} & {m for s in plan.quantized for m in s.modules}
