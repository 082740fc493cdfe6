"""ModelOpt's state in a Megatron checkpoint: what its own run saw is the calibration of the conversion."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import bridge
from bridge.core.errors import CalibrationError, SourceError
from bridge.sources.checkpoint import HfSource
from bridge.sources.opening import open_source
from bridge.sources.quantized import megatron as quantizers
from tests.models.megatron_families import FAMILIES
from tests.oracles import megatron_oracle, megatron_process
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, meta, spelled, stacked
from tests.sources.weights.dcp_saves import bits, save
from tests.tables import foreign as formulas
from tests.tables.checkpoints import headers

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


@pytest.mark.slow
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
        CalibrationError, match=r"needs statistics of activations: .*the checkpoint has no tokenizer"
    ):  # so it would calibrate
        bridge.convert(source, "hf", "fp8", out=tmp_path / "out", verify=False)


def smoothed(dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tiny Llama as SmoothQuant leaves it, and the scales by Hugging Face's modules: powers of two, so exactly."""
    state, scales = quantized(), {}
    numbers = torch.Generator().manual_seed(3)
    for layer in range(3):
        for module, ours in SITES.items():
            weight = state[f"decoder.layers.{layer}.{module}.weight"].to(dtype)
            scale = 2.0 ** torch.randint(-3, 4, (weight.shape[1],), generator=numbers)
            state[f"decoder.layers.{layer}.{module}.weight"] = weight / scale.to(dtype)
            state[f"decoder.layers.{layer}.{module}.input_quantizer._pre_quant_scale"] = scale.to(dtype)
            scales |= {f"model.layers.{layer}.{name}": scale for name in ours}
    return {name: tensor.to(dtype) if "quantizer" not in name else tensor for name, tensor in state.items()}, scales


@pytest.mark.parametrize("piece", [1, 300, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", ["single", "stacked"])
def test_smoothed_weights_are_read_as_they_were(
    layers: str, dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizers, "PIECE", piece)
    state, scales = smoothed(dtype)
    source = open_source(megatron_bridge(tmp_path, stacked(state) if layers == "stacked" else state))
    assert isinstance(source, HfSource)
    for name, tensor in llama(dtype).items():
        assert np.array_equal(source.read(name), bits(tensor)), name
        assert np.array_equal(source.read_rows(name, 3, 11), bits(tensor)[3:11]), name
    assert source.calibration is not None
    found = source.calibration.pre_scale
    assert found.keys() == scales.keys()
    assert all(np.array_equal(found[name], scale.numpy()) for name, scale in scales.items())


@pytest.mark.parametrize("piece", [70, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dialect", ["torchtitan", "meta"])
def test_smoothed_weights_whose_rows_are_in_another_order_are_read_as_they_were(
    dialect: str, dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys: heads of ten rows, pairs side by side; cut at heads and through them."""
    monkeypatch.setattr(quantizers, "PIECE", piece)
    hf = llama(dtype)
    state = spelled(hf, dialect)
    numbers = torch.Generator().manual_seed(3)
    for name in [name for name, tensor in state.items() if name.startswith("layers.") and tensor.ndim == 2]:
        scale = (2.0 ** torch.randint(-3, 4, (state[name].shape[1],), generator=numbers)).to(dtype)
        state[name] = state[name] / scale
        state[f"{name.removesuffix('.weight')}.input_quantizer._pre_quant_scale"] = scale
    if dialect == "meta":
        source = open_source(meta(tmp_path, state))
    else:
        source = open_source(save(tmp_path / "step-3", state), config=CONFIG)
    for name, tensor in hf.items():
        whole = bits(tensor)
        for begin, end in ((0, 10), (3, 11), (10, 20), (0, len(whole))):
            assert np.array_equal(source.read_rows(name, begin, end), whole[begin:end]), (name, begin, end)


@pytest.mark.slow
def test_a_scheme_that_smooths_takes_the_scales_and_another_calibrates_anew(tmp_path: Path) -> None:
    state, scales = smoothed()
    source = open_source(megatron_bridge(tmp_path / "run", state))
    bridge.convert(source, "hf", "int8_sq", out=tmp_path / "out", verify=False)
    name = "model.layers.1.mlp.down_proj"
    with safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        assert np.array_equal(file.get_tensor(f"{name}.pre_quant_scale"), scales[name].numpy())
        assert file.get_tensor(f"{name}.input_scale") == np.float32(2.0 + 3 / 8) / np.float32(127)
    with pytest.raises(CalibrationError, match="needs statistics of activations"):  # those of FP8 are not smoothed
        bridge.convert(source, "hf", "fp8", out=tmp_path / "fp8", verify=False)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        (
            "mlp.linear_fc2.input_quantizer._pre_quant_scale",
            torch.ones(79),
            r"has shape \(79,\), but .* takes 80 inputs",
        ),
        ("mlp.gone.input_quantizer._pre_quant_scale", torch.ones(80), "without the weight that was divided by it"),
        ("mlp.linear_fc2.weight_quantizer._svdquant_lora_a", torch.ones(2, 80), "may have changed the weight"),
        ("mlp.linear_fc2.weight_quantizer._pre_quant_scale", torch.ones(80), "may have changed the weight"),
    ],
)
def test_what_cannot_be_undone_is_refused(name: str, tensor: torch.Tensor, why: str, tmp_path: Path) -> None:
    name = f"decoder.layers.1.{name}"
    with pytest.raises(SourceError, match=rf"{name}: .*{why}"):
        opened(tmp_path, **{name: tensor})


def test_the_quantizer_of_an_unknown_module_is_named(tmp_path: Path) -> None:
    gone = {f"decoder.layers.{layer}.mlp.gone.input_quantizer._amax": torch.ones(1) for layer in range(3)}
    with pytest.raises(SourceError) as caught:
        opened(tmp_path, **gone)
    assert "decoder.layers.{0..2}.mlp.gone.input_quantizer._amax: the state of a module that" in str(caught.value)
    assert "linear" not in str(caught.value)


def test_what_becomes_of_each_number_is_what_is_read(tmp_path: Path) -> None:
    state, _ = smoothed()
    unread = ("core_attention.q_bmm_quantizer._amax", "linear_proj.output_quantizer._amax")
    state |= {f"decoder.layers.{n}.self_attention.{name}": torch.ones(1) for n in range(3) for name in unread}
    source = open_source(megatron_bridge(tmp_path, state))
    told = {name: why.removeprefix("ModelOpt's: ") for name, why in source.dropped.items() if "_quantizer" in name}
    attention = "decoder.layers.{0..2}.self_attention"
    assert [told[f"{attention}.{name}"] for name in unread] == ["not used"] * 2
    kept = "kept as a calibration, unless it is zero or not finite"
    assert told[f"{attention}.core_attention.k_bmm_quantizer._amax"] == kept
    assert told[f"{attention}.linear_qkv.input_quantizer._amax"] == kept
    assert told[f"{attention}.linear_qkv.weight_quantizer._amax"] == "computed anew from the weight"
    assert told[f"{attention}.linear_qkv.input_quantizer._pre_quant_scale"] == "its weight is read times it"
    assert len(told) == 4 * 3 + 2 + 2


def test_keys_that_are_made_anew_have_no_amax(tmp_path: Path) -> None:
    """Latent attention stores what keys and values are made of."""
    config = CONFIG | formulas.CONFIGS["deepseek"] | {"model_type": "deepseek_v3"}
    config |= {"num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}
    hf = {name: np.zeros(spec.shape, np.float32) for name, spec in headers(config).items()}
    state = {name: torch.from_numpy(np.float32(array)) for name, array in formulas.megatron("deepseek", hf).items()}
    name = "decoder.layers.0.self_attention.core_attention.k_bmm_quantizer._amax"
    rank = tmp_path / "iter_0000100/mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": state | {name: torch.ones(1)}}, rank / "model_optim_rng.pt")
    source = open_source(tmp_path, config=config)
    assert source.dropped[name] == "ModelOpt's: not used"
    assert isinstance(source, HfSource) and source.calibration is not None and not source.calibration.k_amax


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_no_weight_is_multiplied_by_what_is_no_scale(number: float, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.input_quantizer._pre_quant_scale"
    source = opened(tmp_path, **{name: torch.full((80,), number)})
    for use in (lambda: source.calibration, lambda: source.read("model.layers.1.mlp.down_proj.weight")):
        with pytest.raises(SourceError, match=f"{name}: holds a number that is not finite and above zero"):
            use()


def test_two_quantizers_of_a_weight_are_none_of_the_model(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight_quantizer"
    source = opened(tmp_path, **{f"{name}.0._amax": torch.ones(48, 20), f"{name}.1._amax": torch.ones(1)})
    assert not any("quantizer" in tensor for tensor in source.specs)
    assert {why for file, why in source.dropped.items() if "weight_quantizer" in file} == {
        "ModelOpt's: computed anew from the weight"
    }


def test_codes_are_refused(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    codes = torch.zeros(48, 80, dtype=torch.uint8)
    with pytest.raises(SourceError, match=rf"{name}: has codes instead of weights"):
        opened(tmp_path, **{name: codes})


def test_a_number_for_each_channel_is_refused(tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.input_quantizer._amax"
    with pytest.raises(SourceError, match=rf"{name} has shape \(80,\): supported is one number per matrix"):
        _ = opened(tmp_path, **{name: torch.ones(80)}).calibration


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.product), "mixtral"])
def test_modelopts_own_checkpoint_calibrates_as_modelopt_does(name: str, tmp_path: Path) -> None:
    """Its run on megatron-core and its run on transformers see the same numbers; on transformers it sends every token
    to every expert, so that their second matrices may see more.
    """
    source, made = by_modelopt(name, "FP8_DEFAULT_CFG", tmp_path)
    found = source.calibration
    wanted = bridge.calibrate(source, "fp8", lambda model: model(torch.from_numpy(made["ids"])))
    assert found is not None
    assert found.input_amax.keys() == wanted.input_amax.keys()
    for module, amax in wanted.input_amax.items():
        routed = ".experts." in module and module.endswith("w2") and found.input_amax[module] < amax
        assert routed or np.isclose(found.input_amax[module], amax, rtol=1e-4), module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("llama", "INT8_SMOOTHQUANT_CFG"),
        pytest.param("llama", "INT4_AWQ_CFG", marks=pytest.mark.product),
        pytest.param("llama", "W4A8_AWQ_BETA_CFG", marks=pytest.mark.product),
        ("mixtral", "INT4_AWQ_CFG"),
    ],
)
def test_what_modelopt_smoothed_is_the_model_that_it_was(name: str, preset: str, tmp_path: Path) -> None:
    """Two roundings of float32 are between a weight and what is read: `w / s`, then `* s`."""
    source, made = by_modelopt(name, preset, tmp_path)
    plain = open_source(tmp_path / "plain", config=FAMILIES[name].hf | {"hidden_act": "silu"})
    assert source.specs.keys() == plain.specs.keys()
    for tensor in source.specs:
        assert np.allclose(source.read(tensor), plain.read(tensor), rtol=2**-22, atol=0), tensor
    calibration = source.calibration
    assert calibration is not None
    calibration.check()
    wanted = {module: array for n, array in made.items() if n.endswith("_pre_quant_scale") for module in readers(n)}
    assert calibration.pre_scale.keys() == wanted.keys()
    assert all(np.array_equal(calibration.pre_scale[module], array) for module, array in wanted.items())
    if preset == "INT8_SMOOTHQUANT_CFG":  # whose scales do not ask what matrices are fused
        scheme = bridge.calibrate(source, "int8_sq", lambda model: model(torch.from_numpy(made["ids"])))
        for module, amax in scheme.smoothing_amax.items():
            assert np.allclose(calibration.pre_scale[module], 1 / amax, rtol=1e-4), module
            assert np.isclose(calibration.input_amax[module], scheme.input_amax[module], rtol=1e-4), module


def readers(quantizer: str) -> list[str]:
    """The modules in transformers whose input a quantizer of the local spec stands before."""
    expert = re.search(r"layers\.(\d)\.mlp\.experts\.local_experts\.(\d)\.linear_fc(\d)", quantizer)
    if expert:
        own = f"model.layers.{expert[1]}.block_sparse_moe.experts.{expert[2]}"
        return [f"{own}.{name}" for name in {"1": ("w1", "w3"), "2": ("w2",)}[expert[3]]]
    layer, module = re.fullmatch(r"decoder\.layers\.(\d)\.(\w+\.\w+)\..*", quantizer).groups()  # type: ignore[union-attr]
    return [f"model.layers.{layer}.{name}" for name in SITES[module]]


def by_modelopt(name: str, preset: str, scratch: Path) -> tuple[HfSource, dict[str, np.ndarray]]:
    """A checkpoint that megatron-core saved after ModelOpt (and one before, `plain`), and what its quantizers held."""
    with ProcessPoolExecutor(1, megatron_oracle.processes()) as pool:
        made = pool.submit(_save_quantized, name, preset, str(scratch)).result()
    source = open_source(scratch / "quantized", config=FAMILIES[name].hf | {"hidden_act": "silu"})
    assert isinstance(source, HfSource)
    return source, made


def _save_quantized(name: str, preset: str, scratch: str) -> dict[str, np.ndarray]:
    megatron_process.start(0, 1, 1, f"{scratch}/store")
    import modelopt.torch.quantization as mtq
    from megatron.core import dist_checkpointing

    model = megatron_process.build(FAMILIES[name])
    megatron_process.fill(model, 5)
    ids = torch.randint(0, 131, (2, 72), generator=torch.Generator().manual_seed(1))

    def save(kind: str) -> None:
        Path(scratch, kind).mkdir()
        metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
        dist_checkpointing.save({"model": dict(model.sharded_state_dict(metadata=metadata))}, f"{scratch}/{kind}")

    save("plain")
    model = mtq.quantize(model, blocks_of_four(getattr(mtq, preset)), lambda m: megatron_process.answer(m, ids))
    save("quantized")
    state = {key: tensor.float().numpy() for key, tensor in model.state_dict().items() if "_quantizer" in key}
    return state | {"ids": ids.numpy()}


def blocks_of_four(preset: Any) -> Any:
    """The preset with blocks that divide the tiny extents."""
    if isinstance(preset, dict):
        return {key: 4 if key == -1 else blocks_of_four(value) for key, value in preset.items()}
    return [blocks_of_four(item) for item in preset] if isinstance(preset, list) else preset
