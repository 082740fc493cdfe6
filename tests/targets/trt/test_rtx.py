"""NVIDIA's own parser and builder on what target trt writes: TensorRT for RTX builds without a GPU, and runs nothing.

Every form of graph is built in half precision and the type of each product is asserted. Schemes that differ in codes
alone share a form.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bridge
from bridge.cli.check import _built, check_paths
from bridge.core.errors import UsageError, WriteError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.targets.onnx.lint import lint
from bridge.targets.trt import engine as engines
from bridge.targets.trt.compiled import DEQUANTIZED, compiled_modules
from bridge.targets.trt.gpus import parse_gpus
from bridge.targets.trt.products import RTX, EngineUnavailable, why_unavailable
from bridge.targets.trt.record import Engine, Engines, altered_engines, load_engines
from tests import once

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]
needs_rtx = pytest.mark.skipif(bool(why_unavailable(RTX)), reason="TensorRT for RTX is not installed")
from transformers import AlbertConfig, AlbertForSequenceClassification, LlamaConfig, LlamaForCausalLM  # noqa: E402

# Variants of a scheme: their weights' numeric.
VARIANTS = {
    "int4-16": ("int4_wo", {"block": (16,)}), "int4-32": ("int4_wo", {"block": (32,)}),
    "int4-64": ("int4_wo", {"block": (64,)}), "fp8-channel": ("fp8", {"per": "channel"}),
}  # fmt: skip
# form -> what its products are compiled to
FORMS = {
    "none": "", "fp8": "FP8", "int8": "INT8", "int8_sq": "INT8", "int8_wo": "weight-only INT8",
    "int4_wo": "weight-only INT4", "int4_awq": "weight-only INT4", "w4a8_awq": "FP8", "int4-16": "weight-only INT4",
    "int4-32": "weight-only INT4", "int4-64": "weight-only INT4", "fp8-channel": "FP8", "mxfp8": "weight-only FP8",
    "fp8_block": "dequantized", "q8_0": "dequantized", "nvfp4_wo": "dequantized", "nvfp4": "FP4",
}  # fmt: skip
MXFP8 = {"weight-only FP8": 4, "dequantized": 3}
CUSTOM = ("mxfp8", "nvfp4")
NEWEST_ONLY = ("nvfp4", "nvfp4_wo")
USUAL = (("fp16", "sm89"), ("bf16", "sm120"))  # with the others, all pairs
LIKE_OTHERS = ("int8_sq", "int4_awq", "int4-16", "int4-64")  # one cell is enough


def usual(form: str, dtype: str, gpu: str) -> bool:
    return (dtype, gpu) in USUAL[: 1 if form in LIKE_OTHERS else 2] or form in NEWEST_ONLY


CELLS = [
    pytest.param(form, dtype, gpu, marks=() if usual(form, dtype, gpu) else pytest.mark.product)
    for form in FORMS
    for dtype in ("fp16", "bf16")
    for gpu in ("sm89", "sm120")
    if gpu == "sm120" or form not in NEWEST_ONLY
]
MODULES = [
    f"model.layers.0.{part}"
    for part in (*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down")))
]


def model() -> Path:
    """A Llama of one layer whose matrices have several blocks along `in`."""

    def make(directory: Path) -> None:
        import torch

        torch.manual_seed(1)
        config = LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=1536, max_position_embeddings=512,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(directory)

    return once.directory("rtx-model", make)


def calibration(scheme: Scheme) -> Calibration:
    """Statistics as a run would give them: compiled types do not depend on their values."""
    amax = dict.fromkeys(MODULES, np.array(4, np.float32))
    wide = {name: np.full(512 if name.endswith("down_proj") else 256, 2, np.float32) for name in MODULES}
    smoothed = {"smoothquant": {"smoothing_amax": wide}, "awq": {"awq_scale": wide}, "awq_full": {"awq_scale": wide}}
    caches = {"model.layers.0.self_attn": np.array(8, np.float32)}
    made_with = Provenance("", "", "", "", "", "", 0, 0)
    return Calibration(made_with, amax, **smoothed.get(scheme.algorithm, {}), k_amax=caches, v_amax=caches)


def scheme_of(form: str) -> Scheme:
    """The scheme of a form."""
    name, changes = VARIANTS.get(form, (form, {}))
    scheme = load_scheme(name)
    return replace(scheme, weight=tuple(replace(numeric, **changes) for numeric in scheme.weight))


def written(form: str, dtype: str, **options: Any) -> Path:
    """The output of a form."""

    def make(directory: Path) -> None:
        scheme = None if form == "none" else scheme_of(form)
        given = {"calib": calibration(scheme)} if scheme else {}
        bridge.convert(
            model(), "trt", scheme, directory / "out", dtype=dtype, verify=False, progress=False,
            custom_ops=form in CUSTOM, **given, **options,
        )  # fmt: skip

    name = "-".join([form, dtype, *(f"{key}={value}" for key, value in options.items())])
    return once.directory(f"rtx-{name}", make) / "out"


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype", "architecture"), CELLS)
def test_every_product_is_compiled_to_its_type(form: str, dtype: str, architecture: str, tmp_path: Path) -> None:
    built = bridge.engine(written(form, dtype), architecture, tmp_path / "engines", progress=False)
    (engine,) = built.engines
    part = MXFP8 if form == "mxfp8" else {FORMS[form]: 7}
    assert dict(engine.compiled) == (part if form != "none" else {})
    assert engine.architectures == (architecture,)
    assert engine.bytes == (tmp_path / "engines" / engine.file).stat().st_size
    assert engine.activation_bytes > 0 and len(engine.profiles) == 2
    assert bool(built.warnings) == ("dequantized" in part)


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kv"), [("fp8", "fp8"), ("int8", "int8")])
def test_a_quantized_cache_is_built(scheme: str, kv: str, tmp_path: Path) -> None:
    built = bridge.engine(written(scheme, "fp16", kv=kv), "sm89", tmp_path / "engines", progress=False)
    assert built.engines[0].compiled == {FORMS[scheme]: 7}


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "first", "fused"), [("int8_wo", "sm75", 2), ("int8", "sm75", 7), ("int4_wo", "sm80", 7)]
)
def test_a_form_is_built_for_the_first_architecture_that_has_it(
    form: str, first: str, fused: int, tmp_path: Path
) -> None:
    built = bridge.engine(written(form, "fp16"), first, tmp_path / "engines", progress=False)
    assert built.engines[0].compiled == {FORMS[form]: fused} | ({"dequantized": 7 - fused} if fused < 7 else {})


@needs_rtx
@pytest.mark.slow
def test_a_recipe_that_mixes_formats_and_quantizes_the_head_is_built(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    rules = (("*.mlp.*", "int4_wo"), ("lm_head", "int8_wo"))
    text = "".join(f'\n[[rule]]\nmodules = ["{modules}"]\nquant = "{quant}"\n' for modules, quant in rules)
    recipe.write_text(f'base = "int8_wo"\n{text}')
    bridge.convert(model(), "trt", str(recipe), tmp_path / "out", dtype="fp16", verify=False, progress=False)
    (engine,) = bridge.engine(tmp_path / "out", "sm89", progress=False).engines
    assert engine.matrices["lm_head"] == "weight-only INT8"
    assert engine.compiled == {"weight-only INT8": 5, "weight-only INT4": 3}


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_is_built_in_any_dtype_without_the_operator(dtype: str, tmp_path: Path) -> None:
    out = written("int8_wo", dtype, opset=24)
    ops = {node.op_type for node in onnx.load(out / "model.onnx", load_external_data=False).graph.node}
    assert "Softmax" in ops and "Attention" not in ops
    assert bridge.engine(out, "sm120", tmp_path / "engines", progress=False).engines[0].compiled == {
        FORMS["int8_wo"]: 7
    }


def test_the_operator_is_written_on_request_and_found_by_lint_where_no_kernel_has_it(tmp_path: Path) -> None:
    out = written("int8_wo", "fp32", attention_op=True)
    assert bridge.plan(model(), "trt", "int8_wo", attention_op=True).options["opset"] == 23
    assert any("[attention-form]" in str(finding) and "float32" in str(finding) for finding in lint(out))
    with pytest.raises(UsageError, match="older ones have no Attention"):
        bridge.plan(model(), "trt", "int8_wo", attention_op=True, opset=21)


def test_matrices_that_are_multiplied_at_once_share_an_fp8_scale() -> None:
    files = [
        SafetensorsFile(written("fp8", "fp16", **more) / "model.safetensors") for more in ({}, {"own_scales": True})
    ]
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        shared, own = (
            [float(file.read(f"model.layers.0.{name}.weight_scale").reshape(())) for name in names] for file in files
        )
        assert len(set(own)) == len(names) and set(shared) == {max(own)}


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_wo", "int4_wo"])
def test_layers_that_share_their_weights_are_built(scheme: str, tmp_path: Path) -> None:
    """ALBERT: the builder crashed where it joined products of weights that a layer before reads too."""
    sizes = {"hidden_size": 256, "embedding_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = AlbertConfig(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    AlbertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    options = {"dtype": "fp16", "engine": "sm89", "verify": False, "progress": False}
    bridge.convert(tmp_path / "model", "trt", scheme, tmp_path / "out", **options)
    (engine,) = load_engines(tmp_path / "out").engines
    assert "matrices run in weight-only" in engine.summary


@needs_rtx
def test_one_engine_for_several_gpus_is_beside_its_graph_and_check_knows_it(tmp_path: Path) -> None:
    out = copied("int4_wo", "fp16", tmp_path)
    (engine,) = bridge.engine(out, ["RTX 4090", "l40s", "5090"], progress=False).engines
    assert engine.architectures == ("sm89", "sm120")
    assert {path.name for path in out.glob("*engine*")} == {"engine.json", "model.sm89+sm120.engine"}
    row = json.loads((out / "engine.json").read_text())["engines"][0]
    assert row["matrices"] == dict.fromkeys(MODULES, "weight-only INT4")
    assert not check_paths([str(out)])
    path = out / engine.file
    path.write_bytes(path.read_bytes()[:-1])
    assert any("was changed or cut" in problem.text for problem in check_paths([str(out)]))
    graph = onnx.load(out / "model.onnx", load_external_data=False)
    graph.doc_string = "another"
    (out / "model.onnx").write_bytes(graph.SerializeToString())
    change_weights(out)
    said = [problem.text for problem in check_paths([str(out)])]
    assert any("is another graph" in text for text in said) and any("are other weights" in text for text in said)


def change_weights(out: Path) -> None:
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)


@needs_rtx
def test_a_second_engine_joins_the_first_and_one_of_old_weights_goes(tmp_path: Path) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    for gpu in ("sm89", "sm120"):
        built = bridge.engine(out, gpu, progress=False)
    record = load_engines(out)
    assert record and [engine.file for engine in record.engines] == ["model.sm89.engine", "model.sm120.engine"]
    assert built.kept == ("model.sm89.engine",) and record.kept == ()
    assert ["kept" in line for line in built.lines()] == [True, False]
    assert not check_paths([str(out)])
    change_weights(out)
    again = bridge.engine(out, "sm120", progress=False)
    assert [path.name for path in out.glob("*.engine")] == ["model.sm120.engine"]
    assert again.removed == ("model.sm89.engine",) and again.lines()[0].startswith("model.sm89.engine: removed: ")


def interrupt(done: int, total: int, text: str) -> None:
    raise KeyboardInterrupt


@needs_rtx
@pytest.mark.parametrize("how", ["builder", "unavailable", "interrupt", "foreign"])
def test_what_fails_leaves_the_engines_and_their_record(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    bridge.engine(out, "sm89", progress=False)
    before = {path.name: path.read_bytes() for path in out.glob("*engine*")}
    if how == "builder":
        monkeypatch.setattr(engines, "run_builder", lambda job, progress: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bridge.engine(out, "sm120", progress=False)
    elif how == "unavailable":
        with pytest.raises(EngineUnavailable, match="--gpu rtx4090"):
            bridge.engine(out)
    elif how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            bridge.engine(out, "sm120", progress=interrupt)
    else:
        (out / "model.sm120.engine").write_bytes(b"mine")
        with pytest.raises(WriteError, match=r"no readable engine\.json beside it names it"):
            bridge.engine(out, "sm120", progress=False)
        assert (out / "model.sm120.engine").read_bytes() == b"mine"
        (out / "model.sm120.engine").unlink()
    assert {path.name: path.read_bytes() for path in out.glob("*engine*")} == before
    assert not list(out.glob("qbridge-*"))


def test_an_engine_that_is_kept_repeats_no_warning() -> None:
    rows = [
        Engine(f"{name}.engine", "TensorRT", "11", ("sm89",), "", "model.onnx", "", "", 1, 1, (), {"q": DEQUANTIZED})
        for name in ("old", "new")
    ]
    made = Engines("", tuple(rows), kept=("old.engine",))
    assert [line.partition(":")[0] for line in made.warnings] == ["new.engine"]


@needs_rtx
def test_the_model_card_is_written_while_no_other_build_may_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(directory: Path, made: Engines) -> None:
        with pytest.raises(WriteError, match="another process builds engines"), engines._alone(directory):
            pass
        named.append(made)

    named: list[Engines] = []
    monkeypatch.setattr("bridge.reporting.model_card.add_engines", locked)
    built = bridge.engine(copied("int8_wo", "fp16", tmp_path), "sm89", progress=False)
    assert named == [built]


@needs_rtx
def test_the_disk_of_an_engine_is_in_the_plan_and_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, plan = (bridge.plan(model(), "trt", "int8_wo", dtype="fp16", **more) for more in ({}, {"engine": "l40s"}))
    weights = sum(output.spec.nbytes for output in plan.outputs)
    assert plan.disk - plain.disk == weights
    assert any("of disk" in note for note in plan.notes)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=plan.disk - weights // 2))
    with pytest.raises(WriteError, match="the plan needs"):
        bridge.convert(model(), "trt", "int8_wo", tmp_path / "out", engine="l40s", verify=False, progress=False)
    assert not list(tmp_path.iterdir())


@needs_rtx
def test_two_builds_of_a_directory_do_not_meet(tmp_path: Path) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    with engines._alone(out), pytest.raises(WriteError, match="another process builds engines"):
        bridge.engine(out, "sm89", progress=False)


@needs_rtx
@pytest.mark.slow
def test_convert_builds_an_engine_and_another_may_follow(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = bridge.convert(
        model(), "trt", "int8_wo", out, engine="rtx4090", profile="batch=1:2:4", verify=False, progress=False
    )
    (engine,) = load_engines(out).engines  # type: ignore[union-attr]
    assert engine.profiles[0]["batch"] == [1, 2, 4]
    line = f"{engine.file}: {engine.line}"
    assert line in report.notes and line.endswith("7 of 7 matrices run in weight-only INT8")
    assert not check_paths([str(out)])
    card = (out / "README.md").read_text()
    assert "## Quantization" in card and "| model.sm89.engine | TensorRT for RTX 1.7.1.116 | sm89 |" in card
    bridge.engine(out, "sm120", progress=False)
    assert not check_paths([str(out)])
    both = (out / "README.md").read_text()
    assert both.count("## Engines") == 1 and "model.sm89.engine" in both and "model.sm120.engine" in both
    assert both.partition("<!-- qbridge: engines -->")[0] == card.partition("<!-- qbridge: engines -->")[0]


@needs_rtx
@pytest.mark.slow
def test_ranges_of_axes_replace_those_of_the_profiles(tmp_path: Path) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    (engine,) = bridge.engine(out, "l40s", profile="batch=1:2:4,past_sequence=0:8:16", progress=False).engines
    prompt, token = engine.profiles
    assert (prompt["batch"], prompt["past_sequence"], token["batch"]) == ((1, 2, 4), (0, 8, 16), (1, 2, 4))
    assert token["sequence"] == (1, 1, 1) and prompt["sequence"][2] > 1
    bad: Any
    for bad, why in (
        ("past_sequence=0:8:512", "513 tokens are more than the 512 positions"),
        ("pasts=0:8:16", "no graph has a dynamic axis 'pasts'; .*past_sequence"),
        ("batch=4:2:1", "a range needs min <= opt <= max"),
        ("batch=0:1:4", "min of batch, above zero"),
        ("batch=1:2", "write an axis as in sequence=1:128:2048"),
        ("batch=1:2:99999999999999999999", "write an axis"),
        ({"batch": (1, 2)}, "write an axis"),
        ("batch=1:2:4,batch=1:2:8", "the axis is given twice"),
        ("total_sequence=1:2:3000", "it is past_sequence and sequence together"),
        ({"batch": 4}, "give a text or a mapping of ranges"),
        (["batch=1:2:4"], "give a text or a mapping of ranges"),
    ):
        with pytest.raises(UsageError, match=why):
            bridge.engine(out, "l40s", profile=bad, progress=False)
    with pytest.raises(UsageError, match="give gpu"):
        bridge.engine(out, memory="1GB")


@needs_rtx
def test_a_profile_of_a_conversion_is_refused_before_any_work() -> None:
    bad: Any
    for bad, why in (
        ({"profile": "batch=1:2:4"}, "give engine too"),
        ({"profile": "batch=4:2:1", "engine": "l40s"}, "a range needs min <= opt <= max"),
        ({"profile": {"pasts": (0, 1, 2)}, "engine": "l40s"}, "no graph has a dynamic axis 'pasts'"),
        ({"profile": "sequence=1:2:513", "engine": "l40s"}, "513 tokens are more than the 512 positions"),
    ):
        with pytest.raises(UsageError, match=why):
            bridge.plan(model(), "trt", "int8_wo", **bad)
    plan = bridge.plan(model(), "trt", "int8_wo", engine="l40s", profile={"batch": (1, 2, 4)})
    assert plan.options["profile"] == {"batch": [1, 2, 4]}


@needs_rtx
@pytest.mark.slow
def test_check_builds_and_says_what_each_matrix_is(tmp_path: Path) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    problems, built = _built([str(out)], "l40s", "batch=1:2:4")
    assert built[str(out)].engines[0].profiles[0]["batch"] == (1, 2, 4)
    assert not problems and built[str(out)].engines[0].summary == "7 of 7 matrices run in weight-only INT8"
    assert not list(out.glob("*engine*"))
    with pytest.raises(UsageError, match="--build: name a directory"):
        _built([], "l40s")


def test_a_convolution_is_a_product_and_the_worse_of_two_profiles_counts() -> None:
    line = (
        "Name: c, LayerType: correlation, Inputs: [ { Name: x, Datatype: Int8, Format: f }], Constants: [ { Name: w, "
        "Datatype: Int8, Format: f }], Outputs: [], TacticName: t, Metadata: [ONNX Layer: c/weight/dequantize]"
    )
    assert compiled_modules(line, ["c", "d"]) == {"c": "INT8", "d": "dequantized"}
    half = line.replace("Name: x, Datatype: Int8", "Name: x, Datatype: Half")
    assert compiled_modules(f"{line}\n{half}", ["c"]) == {"c": "weight-only INT8"}


@needs_rtx
@pytest.mark.parametrize(
    ("form", "dtype", "gpu", "why"),
    [
        ("int8_wo", "bf16", "t4", "no kernels for products in bfloat16 .*which SM80 has"),
        ("fp8", "fp16", "rtx3090,rtx4090", "SM86: it has no kernels for weights in fp8 per tensor .*which SM89 has"),
        ("nvfp4_wo", "fp16", "l40s", "no engine for SM89: .* weights in fp4 per block of 16, e4m3 scales with .*SM120"),
        ("int8_wo", "fp16", "h100", "SM90.*trtexec.txt"),
        ("int8_wo", "fp16", "rtx590", "unknown; nearest: rtx5090"),
        ("int8_wo", "fp16", "banana", "unknown; write the name of an NVIDIA GPU .* or an architecture: sm75, "),
    ],
)  # fmt: skip
def test_gpus_that_lack_a_format_are_refused_before_work(form: str, dtype: str, gpu: str, why: str) -> None:
    out = written(form, dtype)
    with pytest.raises(UsageError, match=why):
        bridge.engine(out, gpu)
    assert not list(out.glob("*engine*"))


@needs_rtx
def test_too_little_memory_is_refused_before_the_builder_starts() -> None:
    with pytest.raises(UsageError, match=r"takes up to .* are allowed \(--memory\)"):
        bridge.engine(written("int8_wo", "fp16"), "sm89", memory="100MB")


@needs_rtx
def test_what_the_parser_refuses_is_named_by_node_and_the_log_is_kept(tmp_path: Path) -> None:
    out = copied("int4_wo", "fp16", tmp_path)
    model = onnx.load(out / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Softmax")
    node.op_type, node.name = "Compress", "broken"
    (out / "model.onnx").write_bytes(model.SerializeToString())
    assert any("[parser]" in problem.text and "broken" in problem.text for problem in check_paths([str(out)]))
    with pytest.raises(WriteError, match=r"parser refuses it(.|\n)*broken(.|\n)*its log: ") as raised:
        bridge.engine(out, "sm89", progress=False)
    assert "broken" in taken(raised.value)
    assert not list(out.glob("*engine*"))


def taken(error: BaseException) -> str:
    """The text of the log that an error names, which is removed."""
    log = Path(str(error).rpartition("its log: ")[2])
    text = log.read_text()
    log.unlink()
    return text


@needs_rtx
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"crashed \(signal 11\) and left nothing"),
        ("raise ImportError('libtensorrt_rtx.so.1: cannot open')", "cannot be loaded: libtensorrt_rtx.*pip install"),
    ],
)
def test_a_builder_that_crashes_or_does_not_load_is_named(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_rtx_bindings.py").write_text(code)
    out = copied("int8_wo", "fp16", tmp_path)
    monkeypatch.setattr(engines, "_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    with pytest.raises(WriteError, match=why) as raised:
        bridge.engine(out, "sm89", progress=False)
    if "its log" in str(raised.value):
        taken(raised.value)
    assert not list(out.glob("*engine*"))


@needs_rtx
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = copied("int8_wo", "fp16", tmp_path)
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    limit += "; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    (tmp_path / "sitecustomize.py").write_text(limit)
    monkeypatch.setattr(engines, "_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    with pytest.raises(WriteError, match="cannot be written: File too large") as raised:
        bridge.engine(out, "sm89", progress=False)
    taken(raised.value)
    assert not list(out.glob("*engine*"))


def test_engine_json_from_strangers_is_read_as_data(tmp_path: Path) -> None:
    for text in ('{"engines": [{"file": 5}]}', "[" * 5000, "{", '{"weights_sha256": "", "engines": 3}'):
        (tmp_path / "engine.json").write_text(text)
        assert ["cannot be read" in line for line in altered_engines(tmp_path)] == [True]


def test_without_the_extra_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(EngineUnavailable, match=r"pip install .*\[tensorrt-rtx\]"):
        bridge.plan(model(), "trt", "int8_wo", engine="sm89")


def test_names_of_gpus_are_those_of_shops_of_nvidia_smi_and_of_architectures() -> None:
    assert parse_gpus("GeForce RTX 4090, NVIDIA L40S, ada, 8.9, NVIDIA RTX 6000 Ada Generation") == ("sm89",)
    assert parse_gpus(["Tesla T4", "NVIDIA A10G", "RTX 4070 Ti SUPER"]) == ("sm75", "sm86", "sm89")
    assert parse_gpus("NVIDIA A100-SXM4-80GB") == ("sm80",)
    assert parse_gpus("ampere") == ("sm80", "sm86")
    bad: Any
    for bad in ("", [], [None], "rtx4090,"):
        with pytest.raises(UsageError, match="give names or architectures"):
            parse_gpus(bad)
    with pytest.raises(UsageError, match=r"nearest: rtx4090, .*; write the name of"):
        parse_gpus("rtx4900")
    with pytest.raises(UsageError, match=r"SM90.*leave it out here, .*trtexec.txt"):
        parse_gpus("NVIDIA H100 80GB HBM3")


def test_a_float32_source_becomes_float16_where_a_gpu_is_named() -> None:
    assert bridge.plan(model(), "trt", "int8_wo").options["dtype"] == "float32"
    if not why_unavailable(RTX):
        plan = bridge.plan(model(), "trt", "int8_wo", engine="l40s")
        assert plan.options["dtype"] == "float16" and any("float32 is written as float16" in n for n in plan.notes)
        assert bridge.plan(model(), "trt", "int8_wo", engine="l40s", dtype="bf16").options["dtype"] == "bfloat16"


def copied(form: str, dtype: str, folder: Path) -> Path:
    """A copy of an output that a test may change."""
    return Path(shutil.copytree(written(form, dtype), folder / "out"))
