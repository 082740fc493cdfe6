"""A rotation as a user asks for it: in the plan, the output, its verification, and calibrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import CalibrationError, PlanError, UsageError
from bridge.workflows.batch.engines.local import Settings, make_engine
from bridge.workflows.batch.manifest.read import read_manifest
from bridge.workflows.batch.prepare.plan import plan_rows
from bridge.workflows.batch.values import Limits
from tests.models.draft_families import FAMILIES
from tests.models.tiny_adapters import write_adapter

TINY = "examples/models/tiny-llama"
TOKENS = torch.arange(3, 67)[None]


def logits(path: str | Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_rotated_output_answers_as_its_source_and_is_verified_against_it(tmp_path: Path) -> None:
    report = bridge.convert(TINY, "hf", None, tmp_path / "plain", rotate="hadamard", progress=False)
    assert report.passed and any(note.startswith("rotated (hadamard): the residual stream") for note in report.notes)
    want = logits(TINY)
    assert (logits(tmp_path / "plain") - want).abs().max() <= 1e-4 * want.abs().max()
    assert json.loads((tmp_path / "plain" / "bridge.json").read_text())["plan"]["rotation"] == "hadamard"
    again = bridge.verify(tmp_path / "plain", against=TINY, progress=False)
    assert again.passed and again.plan_digest == report.plan_digest


def test_a_quantized_one_is_that_of_the_rotated_checkpoint(tmp_path: Path) -> None:
    bridge.convert(TINY, "hf", None, tmp_path / "rotated", rotate="hadamard", progress=False, verify=False)
    bridge.convert(tmp_path / "rotated", "hf", "int8_wo", tmp_path / "two", progress=False, verify=False)
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "one", rotate="hadamard", progress=False, verify=False)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_plan_has_the_rotation_and_only_then_another_digest() -> None:
    plain, turned = bridge.plan(TINY, "hf", "int8_wo"), bridge.plan(TINY, "hf", "int8_wo", rotate="hadamard:heads")
    assert (plain.rotation, turned.rotation) == ("", "hadamard:heads")
    assert plain.digest != turned.digest and plain.sources == turned.sources
    assert any("rotated (hadamard:heads): the values of" in note for note in turned.notes)
    assert "rotation" not in plain.to_dict() and turned.to_dict()["rotation"] == "hadamard:heads"


def test_a_calibration_of_another_rotation_is_refused(tmp_path: Path) -> None:
    plain = bridge.calibrate(TINY, "fp8", samples=2, sequence=64, progress=False)
    with pytest.raises(
        CalibrationError, match="for weights with no rotation, and this conversion has rotation hadamard"
    ):
        bridge.convert(TINY, "hf", "fp8", tmp_path / "out", calib=plain, rotate="hadamard", progress=False)
    turned = bridge.calibrate(TINY, "fp8", samples=2, sequence=64, progress=False, rotate="hadamard")
    with pytest.raises(CalibrationError, match="with rotation hadamard, and this conversion has no rotation"):
        bridge.convert(TINY, "hf", "fp8", tmp_path / "out", calib=turned, progress=False)
    path = turned.save(tmp_path / "turned.safetensors")
    report = bridge.convert(TINY, "hf", "fp8", tmp_path / "out", calib=path, rotate="hadamard", progress=False)
    assert report.passed
    wide = "model.layers.0.mlp.gate_proj"
    assert turned.input_amax[wide] != plain.input_amax[wide]


def test_a_golden_of_a_rotated_output_is_converted_again(tmp_path: Path) -> None:
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "out", rotate="hadamard", progress=False, verify=False)
    bridge.golden.record(tmp_path / "out", tmp_path / "golden", progress=False)
    assert bridge.golden.check(tmp_path / "golden", model=TINY, progress=False).passed


SMALL: dict[str, Any] = {"samples": 4, "sequence": 32, "progress": False}


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rotated checkpoint, unquantized."""
    out = tmp_path_factory.mktemp("turned") / "model"
    bridge.convert(TINY, "hf", None, out, rotate="hadamard", progress=False, verify=False)
    return out


def test_sensitivity_ranks_the_layers_of_the_rotated_checkpoint(turned: Path) -> None:
    ours = bridge.sensitivity(TINY, "int4_wo", rotate="hadamard", **SMALL)
    theirs, plain = (bridge.sensitivity(path, "int4_wo", **SMALL) for path in (turned, TINY))
    costs, want, other = ([layer.cost for layer in one.layers] for one in (ours, theirs, plain))
    assert costs == want != other
    assert any("convert with rotate='hadamard' (--rotate hadamard)" in note for note in ours.notes)


@pytest.mark.slow
def test_a_choice_for_each_layer_is_that_of_the_rotated_checkpoint(turned: Path, tmp_path: Path) -> None:
    quant = "auto:6bits:int4_wo,int8_wo"
    bridge.convert(TINY, "hf", quant, tmp_path / "one", rotate="hadamard", verify=False, **SMALL)
    bridge.convert(turned, "hf", quant, tmp_path / "two", verify=False, **SMALL)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_rows_of_a_batch_are_rotated(tmp_path: Path) -> None:
    text = f'[defaults]\nmodel = "{Path(TINY).absolute()}"\ntarget = "hf"\n'
    for name, more in (("turned", 'rotate = "hadamard"'), ("plain", ""), ("wrong", 'rotate = "random"')):
        text += f'[[row]]\nname = "{name}"\nout = "{name}"\nquant = "int8_wo"\nverify = false\n{more}\n'
    (tmp_path / "batch.toml").write_text(text)
    report = bridge.batch(tmp_path / "batch.toml", workers=1, progress=False)
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "alone", rotate="hadamard", progress=False, verify=False)
    one, two, plain = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("turned", "alone", "plain"))
    assert one == two != plain and "rotate='random' (--rotate): unknown" in report.outcomes["wrong"].error
    assert bridge.batch(tmp_path / "batch.toml", workers=1, progress=False).outcomes["turned"].kept
    fp8 = text.replace("int8_wo", "fp8").replace('rotate = "random"', "")
    (tmp_path / "other.toml").write_text(fp8)
    keys = [
        one.key for one in plan_rows(read_manifest(tmp_path / "other.toml").rows, make_engine(Settings(), Limits()))
    ]
    assert keys[0] != keys[1] == keys[2]  # statistics are of rotated weights, or of others


def test_a_pruned_model_is_rotated_in_a_chain(tmp_path: Path) -> None:
    head = (
        f'out = "made"\n[[step]]\nname = "few"\nverb = "prune"\nmodel = "{Path(TINY).absolute()}"\ndrop_layers = [3]\n'
    )
    text = head + '[[step]]\nname = "coded"\nverb = "convert"\nmodel = "{few}"\ntarget = "hf"\nquant = "int8_wo"\n'
    (tmp_path / "chain.toml").write_text(f'{text}rotate = "random"\n')
    with pytest.raises(UsageError, match=r"step coded: rotate='random' \(--rotate\): unknown"):
        bridge.chain(tmp_path / "chain.toml", progress=False)
    (tmp_path / "chain.toml").write_text(f'{text}rotate = "hadamard"\n')
    report = bridge.chain(tmp_path / "chain.toml", progress=False)
    bridge.convert(
        tmp_path / "made" / "few", "hf", "int8_wo", tmp_path / "alone", rotate="hadamard", progress=False, verify=False
    )
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("made/coded", "alone"))
    assert report.passed and one == two


def test_what_cannot_be_rotated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be rotated exactly; take rotate='hadamard:heads'"):
        bridge.convert("examples/models/tiny-gpt2", "hf", "int8_wo", tmp_path / "out", rotate="hadamard")
    with pytest.raises(UsageError, match="unknown"):
        bridge.plan(TINY, "hf", rotate="random")
    assert not (tmp_path / "out").exists()


def test_draft_layers_are_left_out_with_the_stream_and_kept_with_the_heads(tmp_path: Path) -> None:
    drafts = FAMILIES["deepseek_v3"](tmp_path / "model")
    plan = bridge.plan(tmp_path / "model", "hf", rotate="hadamard")
    assert drafts.keys() <= plan.dropped.keys()
    assert any("reads the stream as it was" in plan.dropped[name] for name in drafts)
    assert any("declares 1 draft layer, but the source has no tensors of it" in note for note in plan.notes)
    kept = bridge.plan(tmp_path / "model", "hf", rotate="hadamard:heads")
    assert drafts.keys() <= {output.spec.name for output in kept.outputs}


def test_an_adapter_is_merged_before_the_rotation(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    bridge.convert(adapter, "hf", None, tmp_path / "merged", base=TINY, progress=False, verify=False)
    report = bridge.convert(adapter, "hf", None, tmp_path / "one", base=TINY, rotate="hadamard", progress=False)
    bridge.convert(tmp_path / "merged", "hf", None, tmp_path / "two", rotate="hadamard", progress=False, verify=False)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two and report.passed
    assert any(note.startswith("adapter") and "; rotated (hadamard)" in note for note in report.notes)
    with pytest.raises(PlanError, match="the adapter beside it reads the model as it was"):
        bridge.plan(adapter, "hf", base=TINY, rotate="hadamard", adapter="keep")
