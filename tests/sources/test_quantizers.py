"""ModelOpt's state in a Megatron checkpoint: what its own run saw is the calibration of the conversion."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import bridge
from bridge.errors import CalibrationError, SourceError
from bridge.sources import open_source
from bridge.sources.hf import HfSource
from tests import megatron_process
from tests.megatron_families import FAMILIES
from tests.sources.foreign_checkpoints import llama, megatron_bridge, spelled

SITES = {  # native module -> what its number stands for
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def quantized(**changes: Any) -> dict[str, torch.Tensor]:
    """The tiny Llama with a number for each quantizer, all different."""
    state = spelled(llama(), "megatron")
    for layer in range(3):
        for number, module in enumerate(SITES):
            amax = torch.tensor([1.0 + layer + number / 8])
            state[f"decoder.layers.{layer}.{module}.input_quantizer._amax"] = amax
            state[f"decoder.layers.{layer}.{module}.weight_quantizer._amax"] = amax / 2
        for number, kind in enumerate("kv"):
            name = f"decoder.layers.{layer}.self_attention.core_attention.{kind}_bmm_quantizer._amax"
            state[name] = torch.tensor([5.0 + layer + number / 8])
    return state | changes


def opened(tmp_path: Path, **changes: Any) -> HfSource:
    source = open_source(megatron_bridge(tmp_path / "run", quantized(**changes)))
    assert isinstance(source, HfSource)
    return source


def test_one_number_stands_for_all_that_read_the_input(tmp_path: Path) -> None:
    calibration = opened(tmp_path).calibration
    assert calibration is not None
    for layer in range(3):
        for number, modules in enumerate(SITES.values()):
            for module in modules:
                amax = calibration.input_amax[f"model.layers.{layer}.{module}"]
                assert (amax, amax.shape, amax.dtype) == (1.0 + layer + number / 8, (), np.float32)
    attention = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    assert [float(calibration.k_amax[name]) for name in attention] == [5.0, 6.0, 7.0]
    assert [float(calibration.v_amax[name]) for name in attention] == [5.125, 6.125, 7.125]


def test_conversion_takes_the_numbers_and_runs_no_model(tmp_path: Path) -> None:
    source = opened(tmp_path)
    bridge.convert(source, "hf", "fp8", out=tmp_path / "out", kv="fp8", verify=False)
    with safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        for layer in range(3):
            for number, modules in enumerate(SITES.values()):
                for module in modules:
                    scale = file.get_tensor(f"model.layers.{layer}.{module}.input_scale")
                    assert scale == np.float32(1.0 + layer + number / 8) / np.float32(448)
    assert "input_quantizer._amax" in "".join(source.dropped)


def test_what_is_not_known_is_left_to_a_calibration(tmp_path: Path) -> None:
    never = "decoder.layers.1.mlp.linear_fc2.input_quantizer._amax"
    source = opened(tmp_path, **{never: torch.zeros(1)})
    assert source.calibration is not None
    assert "model.layers.1.mlp.down_proj" not in source.calibration.input_amax
    with pytest.raises(
        CalibrationError, match=r"needs statistics of activations: .*no tokenizer lies in the"
    ):  # so it would calibrate
        bridge.convert(source, "hf", "fp8", out=tmp_path / "out", verify=False)


def test_smoothed_weights_are_refused(tmp_path: Path) -> None:
    scale = "decoder.layers.0.mlp.linear_fc2.input_quantizer._pre_quant_scale"
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, **{scale: torch.ones(80)})
    assert f"{scale}: ModelOpt divided these modules' weights by the scales (SmoothQuant, AWQ)" in str(caught.value)


def test_codes_are_refused(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    codes = torch.zeros(48, 80, dtype=torch.uint8)
    with pytest.raises(SourceError, match=rf"{name}: holds codes in the place of weights"):
        opened(tmp_path, **{name: codes})


def test_a_number_for_each_channel_is_refused(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.input_quantizer._amax"
    with pytest.raises(SourceError, match=rf"{name} has shape \(80,\): one number for a matrix is read"):
        _ = opened(tmp_path, **{name: torch.ones(80)}).calibration


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_modelopts_own_checkpoint_calibrates_as_modelopt_does(name: str, tmp_path: Path) -> None:
    """Its run on megatron-core and its run on transformers see the same numbers; on transformers it sends every token
    to every expert, so that their second matrices may see more.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        ids = pool.submit(_save_quantized, name, str(tmp_path / "in"), str(tmp_path / "store")).result()
    source = open_source(tmp_path / "in", config=FAMILIES[name].hf | {"hidden_act": "silu"})
    assert isinstance(source, HfSource)
    found = source.calibration
    wanted = bridge.calibrate(source, "fp8", lambda model: model(torch.from_numpy(ids)))
    assert found is not None
    assert found.input_amax.keys() == wanted.input_amax.keys()
    for module, amax in wanted.input_amax.items():
        routed = ".experts." in module and module.endswith("w2") and found.input_amax[module] < amax
        assert routed or np.isclose(found.input_amax[module], amax, rtol=1e-4), module


def _save_quantized(name: str, out: str, store: str) -> np.ndarray:
    megatron_process.start(0, 1, 1, store)
    import modelopt.torch.quantization as mtq
    from megatron.core import dist_checkpointing

    model = megatron_process.build(FAMILIES[name])
    megatron_process.fill(model, 5)
    ids = torch.randint(0, 131, (2, 72), generator=torch.Generator().manual_seed(1))
    model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda model: megatron_process.answer(model, ids))
    Path(out).mkdir()
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
    dist_checkpointing.save({"model": dict(model.sharded_state_dict(metadata=metadata))}, out)
    return ids.numpy()
