"""The linter of target `hf`: what breaks the contract of unified checkpoints, and ModelOpt's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bridge
from bridge.targets.hf.lint import DRAFTS, lint
from tests.models import decoder_families
from tests.models.export_families import build, tokens
from tests.oracles import export_oracle as oracle


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two formats: most in FP8 per channel, one matrix in INT4."""
    root = tmp_path_factory.mktemp("contract")
    directory = oracle.save(build("llama"), root / "source")
    bridge.convert(directory, "hf", "nvfp4_wo", root / "out", verify=False, shard_size="200KB")
    assert lint(root / "out") == []
    return root / "out"


def _rewrite(path: Path, change: dict[str, Any]) -> None:
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | change))


def test_lint_finds_what_breaks_the_contract(written: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(written, tmp_path / name))

    one = broken("index")
    (one / "model.safetensors.index.json").unlink()
    assert any("without model.safetensors.index.json only" in line for line in lint(one))
    two = broken("config")
    (two / "hf_quant_config.json").unlink()
    assert any("hf_quant_config.json cannot be read" in line for line in lint(two))
    three = broken("algorithm")
    section = json.loads((three / "config.json").read_text())["quantization_config"]
    _rewrite(three / "config.json", {"quantization_config": section | {"quant_algo": "FP8"}})
    found = "\n".join(lint(three))
    assert "[FP8] model.layers.{0..1}" in found and "disagree" in found
    four = broken("truncated")
    file = next(four.glob("model-00001*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert lint(four)[0].startswith("error [files]")


def test_a_parameter_of_the_model_that_is_called_a_scale_is_none_of_a_weight(tmp_path: Path) -> None:
    decoder_families.build("DeepseekV4ForCausalLM").save_pretrained(tmp_path)  # hc_attn_scale
    assert lint(tmp_path) == [DRAFTS.format(what="of 1 draft layer no tensor is there")]
    (tmp_path / "model.safetensors").unlink()
    save_file({"a.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "error [config] a.weight_scale: a scale, but config.json has no quantization_config" in lint(tmp_path)


@pytest.mark.slow
def test_lint_holds_modelopts_own_files_to_the_same_contract(tmp_path: Path) -> None:
    directory = oracle.save(build("llama"), tmp_path / "source")
    for scheme, kv in (("fp8", "fp8"), ("int4_awq", None), ("w4a8_awq", None), ("fp8_block", None), ("mxfp8", None)):
        answer = oracle.calibrated(directory, scheme, kv, tokens())
        assert lint(oracle.export(answer, tmp_path / scheme, torch.bfloat16)) == []
