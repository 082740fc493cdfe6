"""Adapters kept beside a quantized base, as servers load them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bridge
from bridge.core.errors import PlanError, SourceError
from bridge.sources.opening import open_source
from tests.models.tiny_adapters import MODEL, factors, write_adapter
from tests.oracles.vllm_oracle import PYTHON

VLLM = """
import json, sys
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.lora_model import LoRAModel
from vllm.config.lora import LoRAConfig
helper = PEFTHelper.from_local_dir(sys.argv[1], max_position_embeddings=None)
helper.validate_legal(LoRAConfig(max_lora_rank=8))
model = LoRAModel.from_local_checkpoint(
    sys.argv[1], {"q_proj", "down_proj"}, peft_helper=helper, lora_model_id=1, device="cpu",
)
print(json.dumps({name: [list(l.lora_a.shape), list(l.lora_b.shape), l.scaling] for name, l in model.loras.items()}))
"""


def test_the_base_is_converted_as_without_an_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned")
    bridge.convert(MODEL, "hf", "fp8_pc_pt", tmp_path / "base", verify=False)
    report = bridge.convert(adapter, "hf", "fp8_pc_pt", tmp_path / "kept", adapter="keep")
    assert report.passed
    assert bridge.verify(tmp_path / "kept", against=adapter).passed
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    kept = tmp_path / "kept" / "adapter"
    assert (kept / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    assert json.loads((kept / "adapter_config.json").read_text())["base_model_name_or_path"] == ".."
    assert open_source(kept, adapter="keep").where == str(tmp_path / "kept")


def test_the_report_says_how_to_serve_it(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned", {"r": 12}, factors(12))
    report = bridge.convert(adapter, "hf", "fp8_pc_pt", tmp_path / "out", adapter="keep", verify=False)
    out = tmp_path / "out"
    assert f"vllm serve {out}" in report.command
    assert f"--enable-lora --max-lora-rank 16 --lora-modules tuned={out}/adapter" in report.command


def test_a_pickled_adapter_is_kept_as_safetensors(tmp_path: Path) -> None:
    import torch

    adapter = write_adapter(tmp_path / "tuned")
    state = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({name: torch.from_numpy(value) for name, value in state.items()}, adapter / "adapter_model.bin")
    bridge.convert(adapter, "hf", "int8_wo", tmp_path / "out", adapter="keep", verify=False)
    kept = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert kept.keys() == state.keys() and all(np.array_equal(kept[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"use_dora": True}, "DoRA, which vLLM, SGLang and TensorRT-LLM do not apply"),
        ({"bias": "lora_only"}, "trained biases, which vLLM does not apply"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\['lm_head'\\], which vLLM does not load"),
    ],
)
def test_what_servers_do_not_apply_is_refused(config: dict[str, object], what: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"{what}.*merge it"):
        open_source(write_adapter(tmp_path / "tuned", config), adapter="keep")


def test_a_target_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="target trt has no place for an adapter"):
        bridge.plan(write_adapter(tmp_path / "tuned"), "trt", "int8_wo", adapter="keep")


@pytest.mark.parametrize("quant", ["int4_awq", "int8_sq"])
def test_a_scheme_that_scales_inputs_is_refused(quant: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="an adapter beside it would read scaled inputs"):
        bridge.plan(write_adapter(tmp_path / "tuned"), "hf", quant, adapter="keep")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make oracles")
def test_vllm_loads_the_kept_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned", {"rank_pattern": {"layers.0.mlp.down_proj": 4}, "use_rslora": True})
    bridge.convert(adapter, "hf", "int8_wo", tmp_path / "out", adapter="keep", verify=False)
    environment = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [PYTHON, "-c", VLLM, str(tmp_path / "out" / "adapter")],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    loras = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(loras) == 10
    assert loras["model.layers.0.self_attn.q_proj"][:2] == [[4, 128], [256, 4]]
