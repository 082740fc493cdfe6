"""NVFP4 after AWQ against ModelOpt's export: pre-scales in norms, in the matrix before, or beside the weight."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import bridge
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from tests.models.export_families import tokens
from tests.oracles import export_oracle as oracle
from tests.targets.hf.test_hf_parity import Case

pytestmark = pytest.mark.slow
NAMES = "model.safetensors"


@pytest.mark.parametrize(
    ("family", "kv", "dtypes"),
    [
        ("llama", "fp8", ("bf16", "bf16")),
        *(
            pytest.param(family, None, ("fp16", "bf16"), marks=pytest.mark.product)
            for family in ("llama-biased", "qwen3", "qwen3-moe", "mistral", "gemma", "phi3", "gpt2", "mixtral")
        ),
    ],
)
def test_every_file_equals_modelopts_export(
    family: str, kv: str | None, dtypes: tuple[str, str], tmp_path: Path
) -> None:
    assert Case(family, tmp_path).unexplained("nvfp4_awq", kv, dtypes, "10GB") == []


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.product)])
def test_pre_scales_go_into_the_matrix_before_where_modelopts_do(dtype: str, tmp_path: Path) -> None:
    """Each query head has rows of v_proj for itself here, which families of `export_families` do not have."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=330, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(oracle.DTYPES[dtype])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0.1, 0.3)
    directory = oracle.save(model, tmp_path / "source")
    answer = oracle.calibrated(directory, "nvfp4_awq", None, tokens())
    ours = oracle.convert(directory, "nvfp4_awq", None, answer, tmp_path / "ours", dtype)
    theirs = oracle.export(answer, tmp_path / "theirs", oracle.DTYPES[dtype])
    assert oracle.differences(ours, theirs) == []
    assert not [name for name in SafetensorsFile(ours / NAMES).specs if "pre_quant_scale" in name]


def test_experts_stay_as_they_are_and_have_the_name_of_the_others(tmp_path: Path) -> None:
    """ModelOpt's export fails where it would average the pre-scales of experts, which stacks do not have."""
    directory = oracle.source("qwen3-moe", "bf16")
    answer = oracle.calibrated(directory, "nvfp4_awq", None, tokens())
    ours = oracle.convert(directory, "nvfp4_awq", None, answer, tmp_path / "ours", "bf16")
    with mock.patch("modelopt.torch.export.unified_export_hf.get_experts_list", lambda *_: []):
        theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    found = oracle.differences(ours, theirs)
    assert [line for line in found if ".json: " not in line] == []
    said = json.loads((ours / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_algo"], said["pre_quant_scale"]) == ("NVFP4_AWQ", True)
    layers = json.loads((theirs / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    assert {layer["quant_algo"] for layer in layers.values()} == {"NVFP4", "NVFP4_AWQ"}


def test_programs_load_it_as_their_contracts_say() -> None:
    source = oracle.source("llama", "bf16")
    plans = {form: bridge.plan(source, "hf", "nvfp4_awq", format=form) for form in ("modelopt", "compressed-tensors")}
    loaded = {
        form: [
            name for name in ("vllm", "sglang", "trtllm", "edgellm") if verdict(load_runtime(name), plan).how != "no"
        ]
        for form, plan in plans.items()
    }
    assert loaded == {"modelopt": ["sglang", "trtllm"], "compressed-tensors": ["vllm", "sglang", "trtllm"]}
