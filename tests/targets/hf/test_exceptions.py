"""What we write otherwise than ModelOpt's exporter: every exception, by its section."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.sources.opening import open_source
from tests.models.export_families import FAMILIES, build, tokens
from tests.oracles import export_oracle as oracle
from tests.targets.hf.test_hf_parity import CLIPPED, EXCEPTIONS, SCHEMES, SEARCHED


def test_every_exception_names_its_section_and_what_it_is_about() -> None:
    for name, entry in EXCEPTIONS.items():
        assert entry["section"] and entry["reason"], name
        assert set(entry["families"]) <= set(FAMILIES), name
        assert set(entry["schemes"]) <= {*SCHEMES, *SEARCHED, *CLIPPED, "nvfp4_awq"}, name
        assert entry["theirs"] in ("raises", "differs", "drops"), name
        assert entry["theirs"] == "drops" or entry["only"], name


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_wo"])
def test_an_all_zero_weight_is_written_as_zeros_where_modelopt_writes_nan(scheme: str, tmp_path: Path) -> None:
    entry = EXCEPTIONS["all-zero"]
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    directory = oracle.save(model, tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours", None)
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    found = oracle.differences(ours, theirs)
    assert found and all("layers.1.mlp.down_proj" in line for line in found), entry["reason"]
    file = SafetensorsFile(ours / "model.safetensors")
    assert not file.read("model.layers.1.mlp.down_proj.weight").any()
    scale = "weight_scale" if scheme == "fp8" else "weight_scale_2"
    assert float(file.read(f"model.layers.1.mlp.down_proj.{scale}")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_wo"])
def test_a_scale_that_rounds_to_zero_is_the_smallest_number_where_modelopt_writes_nan(
    scheme: str, tmp_path: Path
) -> None:
    entry = EXCEPTIONS["scale-rounds-to-zero"]
    model = build("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2.0**-145)
    directory = oracle.save(model, tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours", None)
    theirs = oracle.export(answer, tmp_path / "theirs", torch.float32)
    assert oracle.unexplained(oracle.differences(ours, theirs), [entry]) == []
    scale = f"model.layers.1.mlp.down_proj.{'weight_scale' if scheme == 'fp8' else 'weight_scale_2'}"
    found = [float(SafetensorsFile(path / "model.safetensors").read(scale)) for path in (ours, theirs)]
    assert found == [2.0**-149, 0.0]
    assert np.isfinite(open_source(ours).read("model.layers.1.mlp.down_proj.weight")).all()


@pytest.mark.slow
def test_a_conv1d_that_is_kept_stays_as_the_source_has_it(tmp_path: Path) -> None:
    directory = oracle.source("gpt2", "bf16")
    recipe = tmp_path / "keep.toml"
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nmodules = ["*.c_proj"]\nquant = "none"\n')
    report = bridge.convert(directory, "hf", recipe, tmp_path / "ours", verify=False)
    assert "unquantized Conv1D weights stay [in, out]" in report.notes[0]
    answer = oracle.calibrated(directory, "fp8_pc_pt", None, tokens(), {"*c_proj*": {"enable": False}})
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    found = oracle.differences(tmp_path / "ours", theirs)
    assert found and all(any(part in line for part in EXCEPTIONS["kept-conv1d"]["only"]) for line in found)
    source, ours = (SafetensorsFile(path / "model.safetensors") for path in (directory, tmp_path / "ours"))
    assert np.array_equal(*(file.read("transformer.h.0.mlp.c_proj.weight") for file in (source, ours)))


@pytest.mark.slow
def test_a_tied_head_that_is_quantized_is_untied_in_the_config(tmp_path: Path) -> None:
    directory = oracle.source("llama-tied", "bf16")
    recipe = tmp_path / "head.toml"
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nmodules = ["lm_head"]\nquant = "fp8_pc_pt"\n')
    bridge.convert(directory, "hf", recipe, tmp_path / "ours", verify=False)
    awake = {f"*lm_head.{kind}_quantizer": {"enable": True} for kind in ("weight", "input")}
    answer = oracle.calibrated(directory, "fp8_pc_pt", None, tokens(), awake)
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    found = oracle.differences(tmp_path / "ours", theirs)
    assert found == ["config.json: tie_word_embeddings: False, theirs True"], EXCEPTIONS["untied-head"]["reason"]


@pytest.mark.slow
def test_a_tied_head_that_is_quantized_is_untied_where_the_checkpoint_stores_it_too(tmp_path: Path) -> None:
    directory = oracle.save(build("llama-tied"), tmp_path / "source")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    recipe = tmp_path / "head.toml"
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nmodules = ["lm_head"]\nquant = "fp8_pc_pt"\n')
    for name, quant, untied in (("head", recipe, True), ("none", "fp8_pc_pt", False)):
        report = bridge.convert(directory, "hf", quant, tmp_path / name, verify=False)
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert said["tie_word_embeddings"] is not untied
        assert any("no longer tied" in note for note in report.notes) is untied
        written = SafetensorsFile(tmp_path / name / "model.safetensors").specs
        assert ("lm_head.weight_scale" in written) is untied


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo", "bert"])
def test_a_pre_scale_that_no_norm_can_take_is_written_and_proved(family: str, tmp_path: Path) -> None:
    directory = oracle.source(family, "bf16")
    report = bridge.convert(directory, "hf", "int4_awq", tmp_path / "out", calib=[*tokens(), tokens()[0]])
    assert report.passed and any("pre_quant_scale stays a tensor beside the weights" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek-v2"])
def test_experts_in_int4_are_written_and_proved(family: str, tmp_path: Path) -> None:
    directory = oracle.source(family, "bf16")
    report = bridge.convert(directory, "hf", "int4_wo", tmp_path / "out")
    assert report.passed and report.parity and not report.findings
    experts = [tensor for tensor in report.parity.tensors if ".experts." in tensor.name]
    assert len(experts) > 8 and all(tensor.passed for tensor in experts)
