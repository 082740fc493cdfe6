"""What vLLM makes of experts that the source has in one tensor and target `hf` writes as modules (`make oracles`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.targets.hf.runtime import Runtime
from bridge.targets.manifest import load_manifest
from tests import once
from tests.covering import grid
from tests.oracles import export_oracle, vllm_oracle
from tests.sweep.build import FAMILIES, build, feeds

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(7))
ROUNDING = 2e-5  # float32 products of the same values in another order
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 64}  # tiles of 128 fit
MODELS = {
    "Llama4ForCausalLM": WIDE,
    "GraniteMoeForCausalLM": WIDE,
    "GraniteMoeSharedForCausalLM": WIDE,
    # vLLM runs no mamba on a CPU
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention", "attention"]},
}
# scheme, format -> whether vLLM's logits are those of the weights: inputs are not rounded
CELLS = {
    ("int4_wo", "compressed-tensors"): True,
    ("int8_wo", "compressed-tensors"): True,
    ("nvfp4_wo", "compressed-tensors"): True,
    ("mxfp4_wo", "compressed-tensors"): True,
    ("fp8_pc_pt", "compressed-tensors"): False,
    ("fp8", "compressed-tensors"): False,
    ("nvfp4", "compressed-tensors"): False,
    ("int4_wo", "awq"): True,
    ("int4_wo", "gptq"): True,
    ("fp8_block", "deepseek"): True,
    ("nvfp4_wo", "modelopt"): True,
    ("fp8", "modelopt"): False,
}


@pytest.fixture(autouse=True)
def environment() -> None:
    vllm_oracle.require()


def source(model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, model, FAMILIES[model] | MODELS[model])
    return once.directory(f"split-{model}", lambda part: export_oracle.save(build(model, torch.float32), part))


def write(model: str, cell: tuple[str, str], out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    scheme, format_ = cell
    made = source(model, monkeypatch)
    data: Any = [feeds(export_oracle.load(made), seed) for seed in range(3)] if scheme in ("fp8", "nvfp4") else None
    bridge.convert(made, "hf", scheme, out, calib=data, format=format_, verify=False, progress=False)
    return out


def missing(answer: vllm_oracle.Answer, scheme: str) -> list[str]:
    return answer.missing(weight_only=scheme == "nvfp4_wo")


@pytest.mark.slow
@grid(
    {"model": MODELS, "cell": CELLS},
    valid=lambda model, cell: model != "Llama4ForCausalLM" or cell[1] == "compressed-tensors",
    first=[("Llama4ForCausalLM", ("int4_wo", "compressed-tensors"))],
)
def test_vllm_reads_every_expert_and_gives_the_logits(
    model: str, cell: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(model, cell, tmp_path / "out", monkeypatch)
    answer = vllm_oracle.ask(directory, IDS.tolist())
    unread = [name for name in answer.unread if not name.endswith(".g_idx")]  # GPTQ's natural order needs no kernel
    assert (answer.error, unread, missing(answer, cell[0])) == ("", [], [])
    assert verdict(load_runtime("vllm"), load_manifest(directory).plan).how == "run"
    if CELLS[cell]:
        ours = Runtime(directory).run({"input_ids": IDS[None].numpy()})["output 0"][0]
        assert np.abs(answer.logits - ours).max() <= ROUNDING


@pytest.mark.slow
def test_gate_is_not_up_and_no_expert_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write("GraniteMoeForCausalLM", ("int8_wo", "compressed-tensors"), tmp_path / "out", monkeypatch)
    ours = Runtime(directory).run({"input_ids": IDS[None].numpy()})["output 0"][0]
    path = directory / "model.safetensors"
    tensors = load_file(path)
    experts = "model.layers.0.block_sparse_moe.experts"
    for one, other in (("0.gate_proj", "0.up_proj"), ("0.down_proj", "1.down_proj")):
        changed = dict(tensors)
        for part in ("weight_packed", "weight_scale"):
            a, b = (f"{experts}.{name}.{part}" for name in (one, other))
            changed[a], changed[b] = tensors[b].clone(), tensors[a].clone()
        save_file(changed, path, {"format": "pt"})
        assert np.abs(vllm_oracle.ask(directory, IDS.tolist()).logits - ours).max() > 100 * ROUNDING


@pytest.mark.slow
def test_vllm_does_not_read_modelopts_stacks_of_llama4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its contract say so: with `--for vllm` compressed-tensors is written."""
    directory = write("Llama4ForCausalLM", ("nvfp4_wo", "modelopt"), tmp_path / "out", monkeypatch)
    assert "w2_weight_weight_scale" in vllm_oracle.ask(directory, IDS.tolist()).error
    found = verdict(load_runtime("vllm"), load_manifest(directory).plan)
    assert (found.how, found.instead) == ("no", "--format compressed-tensors")
