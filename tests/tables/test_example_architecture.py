"""`examples/adding_an_architecture`: its one file checks, agrees with transformers, and goes to Megatron and back."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.cli.check import check_path
from bridge.core.mappings import parse_table
from bridge.core.values import TensorSpec
from bridge.sources.configs.families import parse_family
from bridge.tables.architectures.arch import parse_arch
from bridge.tables.architectures.match import match
from bridge.tables.architectures.roles import load_roles
from tests.installed import install, run
from tests.tables.foreign import interleaved
from tests.targets.dcp.test_torchtitan import read_by_torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "adding_an_architecture"
TABLE = EXAMPLE / "qbridge_arcee" / "arch" / "arcee.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's own model."""
    made: Path = runpy.run_path(str(EXAMPLE / "convert.py"))["tiny"](tmp_path_factory.mktemp("model") / "arcee")
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(EXAMPLE, tmp_path_factory.mktemp("site") / "site")


def test_the_table_checks_and_a_mistake_in_it_does_not(tmp_path: Path) -> None:
    assert check_path(TABLE) == []
    text = TABLE.read_text()
    for was, now, says in (
        ('megatron = "gpt"', 'megatron = "llama3"', "`llama3` is not a layout of mappings/dialects/megatron.toml"),
        ('megatron = "gpt"', 'torchtitan = "llama3"', "has no row for `mlp.fc1.weight` of ArceeForCausalLM"),
        ('"kv_heads"\n', '"kvheads"\n', "term `kvheads` is unknown"),
        ('= "mlp.fc1.weight" ', '= "mlp.up.weight" ', "mlp.up.weight without mlp.gate.weight"),
    ):
        assert was in text
        (path := tmp_path / "arcee.toml").write_text(text.replace(was, now))
        assert says in check_path(path)[0].text, now


def test_transformers_has_those_tensors_and_reads_those_fields(model: Path) -> None:
    from transformers import ArceeConfig

    table = parse_arch(parse_table(TABLE.read_text(), TABLE.name), load_roles())
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    specs = {name: TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()}
    found = match(table, "ArceeForCausalLM", config, specs)
    assert not (found.unknown or found.missing or found.misshapen)
    defaults = ArceeConfig()
    said = {name: value for name, value in table.config.items() if value is not None}
    assert said == {name: getattr(defaults, name) for name in said}
    family = parse_family(table.file)
    assert family and {*family.config} <= {*vars(defaults)}
    assert (family.model_type, family.theta) == (defaults.model_type, defaults.rope_parameters["rope_theta"])


@pytest.mark.slow
def test_the_script_runs_and_megatron_gets_what_it_documents(
    model: Path, installed: dict[str, str], tmp_path: Path
) -> None:
    said = run(installed, str(EXAMPLE / "convert.py"), "--out", str(tmp_path))
    assert "fp8_pc_pt" in said and "megatron" in said
    assert all(json.loads(path.read_text())["passed"] for path in tmp_path.glob("*/report.json"))
    hf, native = load_file(model / "model.safetensors"), read_by_torch(tmp_path / "megatron")
    for kind in ("weight", "bias"):
        for layer in range(3):
            q, k, v = (hf[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"].numpy() for x in "qkv")
            made = native[f"decoder.layers.self_attention.linear_qkv.{kind}"][layer]
            assert np.array_equal(made, interleaved(q, k, v, heads=6, groups=2))
        for ours, theirs in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            whole = torch.stack([hf[f"model.layers.{layer}.mlp.{ours}.{kind}"] for layer in range(3)])
            assert torch.equal(native[f"decoder.layers.mlp.{theirs}.{kind}"], whole)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == hf.keys() and all(torch.equal(back[name], hf[name]) for name in hf)
    assert logits(tmp_path / "back") == pytest.approx(logits(model), abs=0)


def logits(directory: Path) -> np.ndarray:
    """Of 64 tokens, by transformers and the config.json that lies there."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(64)[None] * 7 % 112
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory).eval()(ids).logits.numpy()


@pytest.mark.slow
def test_the_package_of_the_example_holds_the_table_and_its_entry_point(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path, EXAMPLE], check=True, capture_output=True, timeout=300)
    wheel = zipfile.ZipFile(next(tmp_path.glob("qbridge_arcee-*.whl")))
    assert wheel.read("qbridge_arcee/arch/arcee.toml") == TABLE.read_bytes()
    points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(points).decode().split() == ["[bridge.mappings]", "arcee", "=", "qbridge_arcee"]
