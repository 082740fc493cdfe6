"""Zeros by magnitude are ModelOpt's, however rows are read, and stay zeros in every number format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.dtypes import to_float32
from bridge.core.errors import PlanError, UsageError, VerifyError
from bridge.sources.opening import open_source
from bridge.sources.pruned.sparse import largest_two_of_four
from tests.models.decoder_families import build

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_inner": 96, "n_head": 4}
OSS = LLAMA | {"num_local_experts": 4}


def two_of_four(weight: np.ndarray) -> bool:
    """Whether at most two of every four values along the last axis are not zero."""
    return bool((np.count_nonzero(weight.reshape(-1, 4), axis=1) <= 2).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
def test_the_choice_is_that_of_modelopt(dtype: Any, ties: bool) -> None:
    from modelopt.torch.sparsity.weight_sparsity.magnitude import create_asp_mask

    random = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 256, generator=random)
    weight = ((weight * 2).round() if ties else weight).to(dtype)
    got = largest_two_of_four(weight.float().abs().numpy(), -1)
    assert np.array_equal(got, create_asp_mask(weight, "2:4 sparsity").numpy())
    assert np.array_equal(largest_two_of_four(weight.float().abs().numpy().T, -2), got.T)


def test_llama_has_the_weights_of_modelopt() -> None:
    import modelopt.torch.sparsity as mts

    model = build("LlamaForCausalLM", torch.float32, **LLAMA)
    got = bridge.pruned(model, sparse="2:4", sparse_method="magnitude").load_model().state_dict()
    oracle = mts.export(mts.sparsify(copy.deepcopy(model), "sparse_magnitude"))
    zeros = 0
    for name, want in oracle.state_dict().items():
        assert torch.equal(got[name], want), name  # -0.0, which a product with the mask leaves, equals 0.0
        zeros += int((want == 0).sum()) > 0
    assert zeros == 14  # seven matrices in each of two layers; the head stays


def test_gpt2_has_the_choice_of_modelopt_in_its_turned_matrices() -> None:
    from modelopt.torch.sparsity.weight_sparsity.magnitude import create_asp_mask

    model = build("GPT2LMHeadModel", torch.float32, **GPT2)  # ModelOpt itself passes over Conv1D
    source = bridge.pruned(model, sparse="2:4", sparse_method="magnitude")
    live = source.load_model()
    assert source.sparse is not None and len(source.sparse.axes) == 8
    for name in source.sparse.axes:
        weight = model.get_parameter(name).detach()
        want = weight * create_asp_mask(weight.T, "2:4 sparsity").T
        assert torch.equal(live.get_parameter(name), want)


@pytest.mark.parametrize(
    ("family", "config"),
    [("GPT2LMHeadModel", GPT2), ("GptOssForCausalLM", OSS), ("MixtralForCausalLM", OSS), ("LlamaForCausalLM", LLAMA)],
)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_rows_are_the_same_in_every_piece(family: str, config: dict[str, Any], method: str) -> None:
    tokens = torch.randint(3, 97, (8, 24), generator=torch.Generator().manual_seed(0))
    model = build(family, torch.float32, **config)
    source = bridge.pruned(model, sparse="2:4", sparse_method=method, data=[{"input_ids": tokens}])
    assert source.sparse is not None and source.sparse.axes
    for name, axis in source.sparse.axes.items():
        whole = source.read(name)
        assert two_of_four(np.moveaxis(whole, axis, -1)), name
        assert np.count_nonzero(whole) > 0.49 * whole.size
        for begin, end in ((0, 1), (1, 3), (2, len(whole)), (3, 4)):
            end = min(end, len(whole))
            assert np.array_equal(source.read_rows(name, begin, end), whole[begin:end])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int8_wo", "int4_wo"])
def test_zeros_stay_zeros_when_quantized(scheme: str, tmp_path: Path) -> None:
    source = bridge.pruned("examples/models/tiny-llama", sparse="2:4", sparse_method="magnitude")
    report = bridge.convert(source, "hf", scheme, tmp_path / "out")
    assert report.passed and report.pruning
    line = "2:4 zeros in 35 matrices (magnitude); as many bytes as before; perplexity 27.80 -> 44.43 on text held out"
    assert report.pruning.line() == line
    bridge.convert(tmp_path / "out", "hf", "none", tmp_path / "plain", verify=False)
    plain = open_source(tmp_path / "plain")
    assert source.sparse is not None
    for name in source.sparse.axes:
        values = to_float32(plain.read(name), plain.specs[name].dtype)
        assert two_of_four(values), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", pytest.param("wanda", marks=pytest.mark.product)])
def test_an_output_is_compared_with_the_whole_model(method: str, tmp_path: Path) -> None:
    report = bridge.prune("examples/models/tiny-llama", out=tmp_path / "out", sparse="2:4", sparse_method=method)
    assert report.passed
    assert bridge.verify(tmp_path / "out", against="examples/models/tiny-llama").passed


@pytest.mark.slow
def test_solved_weights_are_compared_with_their_source(tmp_path: Path) -> None:
    source = bridge.pruned("examples/models/tiny-llama", sparse="2:4", samples=4)
    assert bridge.convert(source, "hf", None, tmp_path / "out").passed
    assert bridge.verify(tmp_path / "out", against=source).passed
    with pytest.raises((PlanError, VerifyError), match="35 tensors that were solved anew"):
        bridge.verify(tmp_path / "out", against="examples/models/tiny-llama")


def test_a_plan_names_the_programs_that_are_faster() -> None:
    source = bridge.pruned("examples/models/tiny-llama", sparse="2:4", sparse_method="magnitude")
    (note,) = [note for note in bridge.plan(source, "trt").notes if note.startswith("sparse")]
    assert "35 matrices; files keep their size, and ONNX Runtime 1.32 (trt_sparsity_enable" in note
    (note,) = [note for note in bridge.plan(source, "hf").notes if note.startswith("sparse")]
    assert note.endswith("no program that a contract is about is faster")


def test_a_plan_of_zeros_takes_the_whole_model() -> None:
    from click.testing import CliRunner

    from bridge.cli.main import app

    model = "examples/models/tiny-llama"
    source = bridge.pruned(model, sparse="2:4", sparse_method="magnitude")
    plan = bridge.plan(model, "trt", sparse="2:4")
    assert (plan.steps, plan.notes) == (bridge.plan(source, "trt").steps, bridge.plan(source, "trt").notes)
    shown = CliRunner().invoke(app, ["plan", model, "--target", "trt", "--sparse", "2:4"])
    assert "sparse: 2:4 in 35 matrices" in shown.stdout
    with pytest.raises(UsageError, match="prune in a first step"):
        bridge.plan(model, "hf", sparse="2:4", keep={"ffn": 192})
    with pytest.raises(UsageError, match=r"sparse='1:2' \(--sparse\): unknown"):
        bridge.plan(model, "hf", sparse="1:2")


def test_what_does_not_go_together_is_refused() -> None:
    model = "examples/models/tiny-llama"
    for wrong in ({"keep": {"ffn": 192}}, {"drop_layers": [3]}, {"repair": True}, {"importance": "weights"}):
        with pytest.raises(UsageError, match="prune in a first step, and make in a second step its output sparse"):
            bridge.pruned(model, sparse="2:4", **wrong)
    with pytest.raises(UsageError, match="--sparse"):
        bridge.pruned(model, sparse="1:2")
    with pytest.raises(UsageError, match="--sparse-method"):
        bridge.pruned(model, sparse="2:4", sparse_method="random")
    narrow = build("LlamaForCausalLM", torch.float32)  # 60 wide
    with pytest.raises(PlanError, match="multiple of 8 and inputs in one of 16"):
        bridge.pruned(narrow, sparse="2:4", sparse_method="magnitude")


def test_two_steps_prune_and_then_make_sparse(tmp_path: Path) -> None:
    smaller = bridge.pruned("examples/models/tiny-llama", {"ffn": 192}, importance="weights")
    source = bridge.pruned(smaller, sparse="2:4", sparse_method="magnitude")
    assert source.specs == smaller.specs
    assert bridge.convert(source, "hf", None, tmp_path / "out").passed
