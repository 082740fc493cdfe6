"""`quant="auto:..."`: a recipe is chosen once, kept beside the output, and converted like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

pytest.importorskip("torch")

import bridge
from bridge.api.sensitivity import automatic
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, UsageError

needs("modelopt")

MODEL = "examples/models/tiny-llama"
QUANT = "auto:6bits:int4_wo,int8_wo"
SMALL = {"samples": 4, "sequence": 64}


def convert(out: Path, quant: Any = QUANT, target: str = "hf", **words: Any) -> bridge.Report:
    return bridge.convert(MODEL, target, quant, out, **{**SMALL, "verify": False, **words})


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the model was measured")


@pytest.fixture
def chosen(tmp_path: Path) -> Path:
    """An output of which the recipe is chosen already."""
    convert(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.slow
def test_a_chosen_recipe_is_kept_and_gives_the_same_bytes_when_it_is_named(chosen: Path) -> None:
    beside = chosen.with_name("out.recipe.toml")
    assert (chosen / "bridge" / "recipe.toml").read_bytes() == beside.read_bytes()
    assert "budget 6bits" in beside.read_text()
    named = chosen.with_name("named")
    convert(named, beside)
    assert (named / "model.safetensors").read_bytes() == (chosen / "model.safetensors").read_bytes()
    plan = bridge.plan(MODEL, "hf", beside)
    assert {step.site.module for step in plan.quantized if step.site}


@pytest.mark.slow
def test_a_second_run_takes_the_recipe_of_the_first_unless_it_shall_not_resume(
    chosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (chosen / "model.safetensors").read_bytes()
    monkeypatch.setattr(automatic, "measured", refuse)
    report = convert(chosen, overwrite=True)
    assert (chosen / "model.safetensors").read_bytes() == before
    assert any("budget 6bits" in note for note in report.notes)
    for words in ({"resume": False}, {"quant": "auto:7bits:int4_wo,int8_wo"}, {"samples": 8}):
        with pytest.raises(AssertionError, match="was measured"):
            convert(chosen, **{"overwrite": True, **words})


@pytest.mark.slow
def test_a_killed_conversion_goes_on_with_the_recipe_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("bridge.targets.manifest.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(out)
    assert not out.exists()
    recipe = out.with_name("out.recipe.toml").read_bytes()
    monkeypatch.setattr(automatic, "measured", refuse)
    convert(out)
    assert (out / "bridge" / "recipe.toml").read_bytes() == recipe


@pytest.mark.slow
def test_an_edited_recipe_is_never_replaced(chosen: Path) -> None:
    beside = chosen.with_name("out.recipe.toml")
    beside.write_text(beside.read_text() + "# my own\n")
    with pytest.raises(UsageError, match=r"out\.recipe\.toml exists and is not a choice as qbridge wrote it"):
        convert(chosen, overwrite=True)


@pytest.mark.slow
def test_a_divergence_is_met_by_what_is_written(tmp_path: Path) -> None:
    report = bridge.convert(MODEL, "hf", "auto:kl=0.02:int4_wo,int8_wo", tmp_path / "out", **SMALL)
    assert report.passed
    text = (tmp_path / "out.recipe.toml").read_text()
    assert float(text.split("divergence ")[1].split()[0]) <= 0.02


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"quant": "auto:"}, UsageError, r"quant='auto:': budget '' is not valid.*as in auto:4\.8bits"),
        ({"quant": "auto:kl=-1"}, UsageError, "not a number above zero"),
        ({"quant": "auto:3bits"}, SchemeError, r"'3bits' cannot be met: .*smallest format of .* takes 4\.25 bits"),
        ({"quant": "auto:5bits:int4_woo"}, UsageError, "nearest: int4_wo"),
        ({"quant": "auto:5bits:fp8,fp8"}, UsageError, "'fp8' is there twice"),
        ({"quant": "auto:5bits:nvfp4_mse,fp8"}, CalibrationError, "cannot be measured without CUDA"),
        ({"calib": "saved.safetensors"}, UsageError, r"calib= .* one scheme.*pass data="),
        ({"runtime": "another 9"}, BridgeError, "has no contract"),
        ({"quant": "auto:5bits:int4_awq,int4_wo", "runtime": "genai"}, BridgeError, "does not load --target hf"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused_before_work(
    words: Any, error: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "measured", refuse)
    with pytest.raises(error, match=said):
        convert(tmp_path / "out", **words)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_cache_of_keys_and_values_is_quantized_and_counted_too(tmp_path: Path) -> None:
    report = convert(tmp_path / "out", kv="fp8")
    assert 'kv   = "fp8"' in (tmp_path / "out.recipe.toml").read_text()
    assert any(step.kv for step in bridge.plan(MODEL, "hf", tmp_path / "out.recipe.toml").steps)
    assert report.scheme == "auto-6bits"


@pytest.mark.slow
def test_a_choice_for_a_program_is_what_that_program_loads(tmp_path: Path) -> None:
    quant = "auto:7bits:int4_wo,fp8_pc_pt"
    report = convert(tmp_path / "out", quant, runtime="vllm")
    loads = {row.program: row for row in report.programs}
    assert next(row for name, row in loads.items() if name.startswith("vLLM")).how != "no"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "bits", "names"),
    [
        pytest.param("hf", 4.8, "", marks=pytest.mark.product),
        ("hf", 5.5, ":nvfp4,fp8"),
        ("gguf", 5.5, ""),
        ("ort", 5.5, ""),
    ],
)
def test_what_is_written_takes_no_more_bits_than_were_asked_for(
    target: str, bits: float, names: str, tmp_path: Path
) -> None:
    """AWQ's pre-scales count, and so do the two bytes of scale that each 32 codes of Q4_0 and Q8_0 have."""
    convert(tmp_path / "out", f"auto:{bits}bits{names}", target=target)
    if names:
        assert all(f'"{name}"' in (tmp_path / "out.recipe.toml").read_text() for name in names[1:].split(","))
    if target == "gguf":
        reader = pytest.importorskip("gguf").GGUFReader(next((tmp_path / "out").rglob("*.gguf")))
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
        weights = {name for name in sizes if name.startswith("blk.") and "norm" not in name}
    else:
        (file,) = (tmp_path / "out").rglob("model.safetensors")
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        sizes = {name: end - start for name, (start, end) in spans.items()}
        weights = {name for name in sizes if "_proj." in name}
    written = 8 * sum(sizes[name] for name in weights) / 1_146_880  # of 35 matrices
    text = (tmp_path / "out.recipe.toml").read_text()
    assert bits - 0.3 < written <= bits
    assert f"{written:.2f} bits a weight" in text


@pytest.mark.parametrize("budget", ["5.5bits", "kl=0.01"])
def test_a_target_that_stores_values_instead_of_codes_is_refused_before_work(
    budget: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(automatic, "measured", refuse)
    with pytest.raises(SchemeError, match=r"target tripy writes no matrix smaller than unquantized"):
        convert(tmp_path / "out", f"auto:{budget}", target="tripy")
