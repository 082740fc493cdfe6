"""gpt-oss, whose experts lie in one tensor, to target `hf`: against ModelOpt's own export, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import SchemeError
from bridge.targets.hf.lint import lint
from tests.models.export_families import ROPE, WIDE, tokens
from tests.oracles import export_oracle as oracle

# moe_ffn 384, hidden 256, and five experts: extents differ, and blocks of 128 fit
SIZES: dict[str, Any] = WIDE | {
    "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 23, "rope_parameters": ROPE,
}  # fmt: skip
KEEP = 'base = "{}"\n[[rule]]\nroles = ["moe.*"]\nquant = "none"\n'
OFF = {"*mlp.experts*": {"enable": False}}
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def gpt_oss() -> Any:
    return T.GptOssForCausalLM(T.GptOssConfig(**SIZES))


def llama4() -> Any:
    """A table says of gpt-oss what it holds; of this the class does."""
    sizes = WIDE | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 512}
    more = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1], "rope_parameters": ROPE}
    return T.Llama4ForCausalLM(T.Llama4TextConfig(**sizes, **more))


def granite() -> Any:
    sizes = {key: value for key, value in WIDE.items() if key != "head_dim"}
    return T.GraniteMoeForCausalLM(T.GraniteMoeConfig(**sizes, num_local_experts=5, num_experts_per_tok=3))


def build(dtype: torch.dtype = torch.bfloat16, make: Callable[[], Any] = gpt_oss) -> Any:
    torch.manual_seed(5)
    model = make().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtypes", "shards"),
    [
        ("fp8", ("bf16", "bf16"), "300KB"),
        ("fp8", ("fp32", "bf16"), "10GB"),
        ("fp8", ("fp16", "fp16"), "10GB"),
        ("nvfp4_wo", ("bf16", "bf16"), "300KB"),
        ("nvfp4_wo", ("fp32", "bf16"), "10GB"),
    ],
)
def test_stacked_experts_equal_modelopts_export(
    scheme: str, dtypes: tuple[str, str], shards: str, tmp_path: Path
) -> None:
    source, export = dtypes
    directory = oracle.save(build(oracle.DTYPES[source]), tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, "fp8", tokens())
    ours = oracle.convert(directory, scheme, "fp8", answer, tmp_path / "ours", export, shards)
    theirs = oracle.export(answer, tmp_path / "theirs", oracle.DTYPES[export], shards)
    if source != export:
        oracle.recast(theirs, oracle.DTYPES[source], oracle.DTYPES[export])
    assert oracle.differences(ours, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_wo"])
def test_stacked_experts_without_a_table_equal_modelopts_export(scheme: str, tmp_path: Path) -> None:
    directory = oracle.save(build(make=llama4), tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours", "bf16")
    assert oracle.differences(ours, oracle.export(answer, tmp_path / "theirs", torch.bfloat16)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_wo"])
def test_experts_that_modelopt_takes_apart_equal_its_export(scheme: str, tmp_path: Path) -> None:
    directory = oracle.save(build(make=granite), tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours", "bf16")
    differences = oracle.differences(ours, oracle.export(answer, tmp_path / "theirs", torch.bfloat16))
    # the checkpoint has the router's matrix in a module of its own, the model in memory has not
    assert [line for line in differences if "block_sparse_moe.router" not in line] == []


@pytest.mark.slow
def test_calibrating_and_converting_in_one_call_equals_modelopts_export(tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    options = {"calib": [*tokens(), tokens()[0]], "verify": False, "own_scales": True}
    bridge.convert(directory, "hf", "fp8", tmp_path / "ours", **options)
    answer = oracle.calibrated(directory, "fp8", None, tokens())
    assert oracle.differences(tmp_path / "ours", oracle.export(answer, tmp_path / "theirs", torch.bfloat16)) == []


@pytest.mark.slow
def test_kept_experts_equal_those_that_modelopt_leaves_alone(tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    (tmp_path / "keep.toml").write_text(KEEP.format("fp8"))
    answer = oracle.calibrated(directory, "fp8", None, tokens(), OFF)
    options = {"calib": answer.calibration, "verify": False, "own_scales": True}
    bridge.convert(directory, "hf", tmp_path / "keep.toml", tmp_path / "ours", **options)
    assert oracle.differences(tmp_path / "ours", oracle.export(answer, tmp_path / "theirs", torch.bfloat16)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4_wo", "fp8"])
def test_the_report_measures_stacks(scheme: str, tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    report = bridge.convert(directory, "hf", scheme, tmp_path / "out", calib=[*tokens(), tokens()[0]])
    assert report.passed
    rows = {row.name: row for row in report.parity.tensors}
    assert 0.98 < rows[STACK].cosine < 1
    assert lint(tmp_path / "out") == []
    _spoil(tmp_path / "out", STACK)
    again = bridge.verify(tmp_path / "out", against=directory)
    assert not again.passed
    assert [row.name for row in again.parity.tensors if not row.passed] == [STACK]


@pytest.mark.parametrize(("part", "says"), [("_weight_scale_2", "weight_scale_2 is missing"), ("", "but no weight")])
def test_lint_misses_a_part_of_a_stack(part: str, says: str, tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    bridge.convert(directory, "hf", "nvfp4_wo", tmp_path / "out", verify=False)
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if name != STACK + part}, path)
    assert any(STACK in line and says in line for line in lint(tmp_path / "out"))


def _spoil(root: Path, name: str) -> None:
    """Exchange two experts in a written file."""
    (path,) = [p for p in root.glob("*.safetensors") if name in load_file(p)]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    codes = tensors[name].view(torch.uint8)
    tensors[name] = codes[[1, 0, 2, 3, 4]].view(tensors[name].dtype)
    save_file(tensors, path, metadata)


@pytest.mark.slow
def test_an_expert_of_zeros_is_written_as_zeros(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2] = 0
        model.model.layers[0].mlp.experts.down_proj[:] = 0
    directory = oracle.save(model, tmp_path / "source")
    report = bridge.convert(directory, "hf", "nvfp4_wo", tmp_path / "out")
    assert report.passed
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not tensors[STACK][2].any() and tensors[STACK][1].any()
    assert not tensors["model.layers.0.mlp.experts.down_proj"].any()
    scales = [t.float() for name, t in tensors.items() if "weight_scale" in name]
    assert all(bool((scale > 0).all()) and bool(scale.isfinite().all()) for scale in scales)


@pytest.mark.parametrize("scheme", ["int8_wo", "fp8_pc_pt", "fp8_block", "mxfp8", "int4_wo", "mxfp4_wo"])
def test_other_schemes_leave_stacks_and_say_so(scheme: str, tmp_path: Path) -> None:
    plan = bridge.plan(oracle.save(build(), tmp_path / "source"), "hf", scheme)
    (note,) = [note for note in plan.notes if "experts" in note]
    assert note.startswith(
        "model.layers.{0..1}.mlp.experts.gate_up_proj, model.layers.{0..1}.mlp.experts.down_proj: stays unquantized"
    )
    assert "fp8, nvfp4 and nvfp4_wo" in note
    assert {step.site.keep for step in plan.quantized if step.site} == {""}
    assert not any("experts" in step.source for step in plan.quantized)


def test_target_tripy_refuses_stacks_in_words(tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    with pytest.raises(SchemeError, match="holds all experts of a layer in one tensor") as caught:
        bridge.plan(directory, "tripy", "fp8")
    assert 'modules = ["*.experts.gate_up_proj", "*.experts.down_proj"], quant = "none"' in str(caught.value)


@pytest.mark.parametrize("scheme", ["int4_awq", "int8_sq"])
def test_target_trt_does_not_smooth_experts(scheme: str, tmp_path: Path) -> None:
    """All of a layer have one input, and ModelOpt smooths none."""
    plan = bridge.plan(oracle.save(build(), tmp_path / "source"), "trt", scheme)
    experts = [step for step in plan.quantized if "experts" in step.source]
    assert experts and {step.format.algorithm for step in experts if step.format} == {"max"}
    assert "experts are not smoothed" in " ".join(plan.notes)


def test_target_trt_has_a_matrix_for_each_expert_and_says_what_that_costs(tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    plan = bridge.plan(directory, "trt", "fp8")
    name = "model.layers.1.mlp.experts.down_proj"
    experts = [step for step in plan.quantized if step.source == name]
    assert [step.inputs[0].expert for step in experts] == list(range(plan.sources[name].shape[0]))
    assert [step.outputs[0].spec.name for step in experts] == [f"{name}[{n}]" for n in range(len(experts))]
    assert f"every token runs through all {len(experts)} experts" in " ".join(plan.notes)


def test_a_plain_conversion_changes_no_byte(tmp_path: Path) -> None:
    directory = oracle.save(build(), tmp_path / "source")
    report = bridge.convert(directory, "hf", None, tmp_path / "out", verify=True)
    assert report.passed
    before, after = (load_file(root / "model.safetensors") for root in (directory, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(t.view(torch.uint8), after[name].view(torch.uint8)) for name, t in before.items())
