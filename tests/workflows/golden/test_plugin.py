"""Goldens from a shell, in a user's suite, and with a run: the same words everywhere, exit codes, nothing loaded."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes
from bridge.workflows.golden.store import load
from tests.models.golden_made import LLAMA, Q, changed, written
from tests.test_imports import FRAMEWORKS, loaded, modules

SUITE = """
from pathlib import Path

def test_model(golden):
    golden("golden", Path(__file__).with_name("out.txt").read_text(), run=False)
"""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden beside the model that it was recorded of."""
    place = tmp_path_factory.mktemp("golden")
    bridge.golden.record(written(place / "out"), place / "golden", run=False)
    return place / "golden"


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["golden", *map(str, words)])
    return result.exit_code, result.output


@pytest.mark.slow
def test_exit_codes_and_words(golden: Path, tmp_path: Path) -> None:
    out = golden.parent / "out"
    other = changed(out, tmp_path / "other", Q)
    code, said = run("record", out, tmp_path / "golden", "--no-run")
    assert code == 0 and "83 tensors" in said
    assert run("check", tmp_path / "golden", out)[0] == 0
    code, said = run("check", tmp_path / "golden", other)
    assert code == 1 and "1 of 83 tensors moved (codes 1)" in said and Q in said
    code, said = run("diff", out, other, "--json")
    assert code == 1 and json.loads(said)["moves"][0]["name"] == Q
    code, said = run("record", other, tmp_path / "golden", "--no-run")
    assert code == 1 and "say why: --reason TEXT" in said
    assert run("record", other, tmp_path / "golden", "--no-run", "--reason", "new")[0] == 0
    assert run("check", tmp_path / "golden")[0] == 2
    assert run("check", tmp_path / "nowhere", out)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.norm.weight"], "note: 1 tensor holds values that are not finite: model.norm.weight (1)"),
        ([f"model.layers.{at}.input_layernorm.weight" for at in range(4)], "note: 4 tensors hold values that are"),
    ],
)
def test_values_that_are_not_finite_are_noted(names: list[str], said: str, golden: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(golden.parent / "out", out)
    file = SafetensorsFile(out / "model.safetensors")
    tensors = {name: np.array(file.read(name)) for name in file.specs}
    for name in names:
        tensors[name].reshape(-1)[2] = np.nan
    (out / "model.safetensors").write_bytes(file_bytes(tensors, {"format": "pt"}))
    code, told = run("record", out, tmp_path / "golden", "--no-run")
    assert code == 0 and said in told and ("and 1 more" in told) == (len(names) > 3)
    data = json.loads(run("record", out, tmp_path / "golden", "--no-run", "--json")[1])
    assert data["not_finite"] == dict.fromkeys(names, 1)
    assert "note: " not in run("record", golden.parent / "out", tmp_path / "well", "--no-run")[1]


@pytest.mark.slow
def test_a_golden_without_outputs_says_so_whatever_is_printed(golden: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "golden"
    shutil.copytree(golden.parent / "out", out)
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace("LlamaForCausalLM", "LamaForCausalLM"))
    why = "the written checkpoint does not load: architecture LamaForCausalLM is not in transformers"
    for words in ((), ("--quiet",), ("--json",)):
        told = CliRunner().invoke(app, ["golden", "record", str(out), str(kept), *words])
        assert told.exit_code == 0
        assert told.stderr.startswith(f"note: {kept} records bytes only, no inputs and outputs: {why}")
        assert told.stderr.count("\n") == 1
    assert load(kept).reference.not_run.startswith(why)
    assert "note: " not in run("record", out, tmp_path / "bytes", "--no-run")[1]
    code, said = run("record", out, tmp_path / "other", "--tolerance", "0.1")
    assert code == 1 and "was not run, but --tolerance needs its outputs: the written" in said
    assert not (tmp_path / "other").exists()


class Suite:
    """A user's suite in `place`, run inside this process, with the plugin as its entry point would load it."""

    def __init__(self, place: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.place, self.capture = place, capture

    def __call__(self, out: Path, *words: str) -> tuple[int, str]:
        (self.place / "test_model.py").write_text(SUITE)
        (self.place / "out.txt").write_text(str(out))
        alone = [
            "-p",
            "bridge.workflows.golden.pytest_plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(self.place),
        ]
        code = pytest.main(["-q", "--import-mode=importlib", *alone, *words, str(self.place)])
        return int(code), self.capture.readouterr().out


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Suite:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Suite(tmp_path, capsys)


@pytest.mark.slow
def test_the_fixture_fails_with_the_text_of_check(golden: Path, tmp_path: Path, suite: Suite) -> None:
    out = golden.parent / "out"
    other = changed(out, tmp_path / "other", Q)
    code, said = suite(out)
    assert code == 1 and "no such directory; `qbridge golden record OUT" in said
    assert suite(out, "--golden-reason", "first")[0] == 0
    assert suite(out)[0] == 0
    code, said = suite(other)
    for line in str(bridge.golden.check(tmp_path / "golden", other)).splitlines():
        assert line.rstrip() in said, line
    assert code == 1 and "--golden-reason TEXT records the new state" in said
    for _ in range(2):  # what is as its golden has it is not recorded again
        assert suite(other, "--golden-reason", "new ties")[0] == 0
    assert [entry.reason for entry in load(tmp_path / "golden").history] == ["first", "new ties"]


def test_the_plugin_is_registered_and_loads_nothing() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"qbridge": "bridge.workflows.golden.pytest_plugin"}
    assert not loaded("import bridge.workflows.golden.pytest_plugin") & (FRAMEWORKS | {"numpy", "rich", "click"})


@pytest.mark.slow
def test_a_check_where_nothing_moved_loads_no_framework(golden: Path) -> None:
    code = f"import bridge; assert bridge.golden.check({str(golden)!r}, {str(golden.parent / 'out')!r}).passed"
    assert not {name.partition(".")[0] for name in modules(code)} & FRAMEWORKS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["hf", "tripy", "trt"])
def test_a_run_is_held_to_from_its_first_matrix_on(target: str, tmp_path: Path) -> None:
    out = written(tmp_path / "out", target)
    made = bridge.golden.record(out, tmp_path / "golden")
    names = list(made.reference.values)
    assert names[-1] == "output" and len(names) == 2 * 16 + 1
    assert names[0] == "model.layers.0.self_attn.q_proj input" or target != "hf"
    assert bridge.golden.check(tmp_path / "golden", out, run=True).passed
    norm = "model.layers.1.input_layernorm.weight"
    moved = bridge.golden.check(tmp_path / "golden", changed(out, tmp_path / "other", norm, at=3))
    assert (moved.moves[0].kind, moved.moves[0].name) == ("weights", norm)
    outputs = [move.name for move in moved.moves if move.kind == "outputs"]
    assert outputs and not [name for name in outputs if ".layers.0." in name]
    assert "model.layers.1.self_attn.q_proj input" in outputs and "output" in outputs


@pytest.mark.slow
def test_outputs_within_the_tolerance_have_not_moved(tmp_path: Path) -> None:
    out = written(tmp_path / "out")
    bridge.golden.record(out, tmp_path / "golden", tolerance=10.0)
    other = changed(out, tmp_path / "other", Q)
    assert [move.kind for move in bridge.golden.check(tmp_path / "golden", other, run=True).moves] == ["codes"]
    inputs = {"input_ids": np.arange(12).reshape(1, 12)}
    made = bridge.golden.record(out, tmp_path / "own", inputs=inputs)
    assert np.array_equal(load(tmp_path / "own").reference.inputs["input_ids"], inputs["input_ids"])
    assert made.reference.ran and LLAMA.is_dir()


@pytest.mark.slow
def test_a_model_that_does_not_run_any_more_is_told_beside_what_moved(tmp_path: Path) -> None:
    out = written(tmp_path / "out")
    bridge.golden.record(out, tmp_path / "golden")
    (out / "config.json").write_text('{"model_type": "llama"}')
    moved = bridge.golden.check(tmp_path / "golden", out)
    assert [move.kind for move in moved.moves] == ["file", "outputs"]
    assert "no longer runs" in moved.moves[1].text


@pytest.mark.slow
def test_images_go_into_a_model_of_another_dtype(tmp_path: Path) -> None:
    import torch
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 4], image_size=32, window_size=4, drop_path_rate=0.0)
    torch.manual_seed(0)
    model = SwinForImageClassification(config)
    for name, dtype in (("float", torch.float32), ("half", torch.bfloat16)):
        bridge.convert(model.to(dtype), "hf", "int8_wo", tmp_path / name, verify=False)
        made = bridge.golden.record(tmp_path / name, tmp_path / f"golden-{name}")
        assert made.reference.values and made.reference.inputs["pixel_values"].dtype == np.float32
    moved = bridge.golden.check(tmp_path / "golden-float", tmp_path / "half")
    assert "tolerance" in next(move.text for move in moved.moves if move.name == "output")
