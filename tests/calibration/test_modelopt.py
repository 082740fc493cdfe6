"""Calibration runs ModelOpt as its own presets do, and leaves no trace on the model it was given."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.needs import Lazy, needs

torch = pytest.importorskip("torch")
needs("modelopt")
mtq = Lazy("modelopt.torch.quantization")

import transformers  # noqa: E402

import bridge  # noqa: E402
from bridge.calibration.reference_outputs import answer_again  # noqa: E402
from bridge.core.values import Format  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.tables.architectures.structure import structure  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.calibrated_models import FAMILIES, IDS, both, built, run  # noqa: E402
from tests.oracles.modelopt_oracle import ask  # noqa: E402


def preset(model: Any, config: Any, algorithm: Any = None) -> Any:
    """ModelOpt's own preset on a copy, without the quantizers of norms, embeddings and BERT's head."""
    config = copy.deepcopy(config)
    kinds = ("nn.LayerNorm", "nn.Embedding")
    config["quant_cfg"] += [{"quantizer_name": "*input_quantizer", "parent_class": k, "enable": False} for k in kinds]
    config["quant_cfg"] += [{"quantizer_name": "*decoder*", "enable": False}]  # BERT's head, under another name
    if algorithm:
        config["algorithm"] = algorithm

    def loop(copied: Any) -> None:
        for ids in IDS[:-1]:  # the last batch is held out
            copied(ids)

    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        return mtq.quantize(copy.deepcopy(model), config, loop)


def live_quantizer(name: str, family: str) -> str:
    """Where ModelOpt keeps the input quantizer of a checkpoint module of `family`."""
    if family == "mixtral" and ".experts." in name:
        stack, _, leaf = name.rpartition(".")
        param = "down_proj" if leaf == "w2" else "gate_up_proj"
        return f"{stack.rpartition('.')[0].replace('block_sparse_moe', 'mlp')}.{param}_input_quantizer"
    return f"{name}.input_quantizer"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fp8_statistics_are_those_of_modelopts_preset(family: str) -> None:
    model = built(family)
    found, theirs = run(model, load_scheme("fp8")), preset(model, mtq.FP8_DEFAULT_CFG)
    expected = {n for n, m in theirs.named_modules() if n.endswith("input_quantizer") and m.is_enabled}
    assert {live_quantizer(name, family) for name in found.input_amax} == expected
    for name, amax in found.input_amax.items():
        assert float(amax) == float(theirs.get_submodule(live_quantizer(name, family)).amax), name


def test_every_expert_gets_the_statistics_of_its_stack() -> None:
    found = run(built("mixtral"), load_scheme("fp8"))
    experts = [name for name in found.input_amax if ".experts." in name]
    assert len(experts) == 2 * 5 * 3
    layer = {float(found.input_amax[f"model.layers.0.block_sparse_moe.experts.{e}.w1"]) for e in range(5)}
    assert len(layer) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_kv_statistics_are_those_of_modelopts_preset(family: str) -> None:
    model = built(family)
    found = run(model, load_scheme("int8_wo", kv="fp8"))
    config = {**copy.deepcopy(mtq.FP8_KV_CFG), "algorithm": "max"}
    theirs = preset(model, config)
    assert found.input_amax == {} and len(found.k_amax) == len(found.v_amax) == 2
    for name, amax in found.k_amax.items():
        assert float(amax) == float(theirs.get_submodule(f"{name}.k_bmm_quantizer").amax)
        assert float(found.v_amax[name]) == float(theirs.get_submodule(f"{name}.v_bmm_quantizer").amax)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_awq", "int8_sq"])
def test_the_cache_is_calibrated_in_the_run_of_the_weights_as_modelopt_does(scheme: str) -> None:
    model, ids = built("llama", torch.bfloat16), torch.arange(2 * 64).reshape(2, 64) % 90
    theirs = ask(model, scheme, lambda m: m(ids), kv="fp8").calibration
    ours = bridge.calibrate(model, scheme, lambda m: m(ids), kv="fp8")
    for kind in ("awq_scale", "smoothing_amax", "k_amax", "v_amax"):
        found = getattr(ours, kind)
        assert found.keys() == getattr(theirs, kind).keys()
        assert all(np.array_equal(array, getattr(theirs, kind)[name]) for name, array in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_smoothquant_statistics_are_those_of_modelopts_preset(family: str) -> None:
    model = built(family, torch.bfloat16)
    found, theirs = run(model, load_scheme("int8_sq")), preset(model, mtq.INT8_SMOOTHQUANT_CFG)
    assert found.smoothing_amax and not found.pre_scale and found.provenance.dtype == "bfloat16"
    for name, amax in found.smoothing_amax.items():
        quantizer = theirs.get_submodule(f"{name}.input_quantizer")
        assert np.array_equal(amax, quantizer._amax_for_smoothing.float().reshape(-1).numpy())
        assert float(found.input_amax[name]) == float(quantizer.amax)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_int8_pre_scales_are_those_of_modelopts_smoothquant(family: str, dtype: str) -> None:
    model = built(family, getattr(torch, dtype))
    alpha = dict(load_scheme("int8").options)["alpha"]
    found = run(model, load_scheme("int8"))
    theirs = preset(model, mtq.INT8_SMOOTHQUANT_CFG, {"method": "smoothquant", "alpha": alpha})
    assert found.pre_scale and not found.smoothing_amax
    for name, scale in found.pre_scale.items():
        module = theirs.get_submodule(name)
        rounded = torch.from_numpy(scale).to(model.dtype)
        assert torch.equal(rounded, module.input_quantizer._pre_quant_scale.reshape(-1)), name
        plain = model.get_submodule(name).weight
        plain = plain.T if family == "gpt2" else plain
        smoothed = (plain * (1 / torch.from_numpy(scale))).to(model.dtype)
        assert torch.equal(smoothed, module.weight), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_awq", "w4a8_awq"])
def test_awq_scales_are_those_of_modelopts_preset(name: str) -> None:
    model = built("llama")
    config = {"int4_awq": mtq.INT4_AWQ_CFG, "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG}[name]
    found = run(model, load_scheme(name))
    theirs = preset(model, config, {"method": "awq_lite", "alpha_step": 0.1})
    assert len(found.awq_scale) == 14
    for module, scale in found.awq_scale.items():
        expected = theirs.get_submodule(module)
        assert torch.equal(torch.from_numpy(1 / scale), expected.input_quantizer._pre_quant_scale), module
        smoothed = model.get_submodule(module).weight * (1 / torch.from_numpy(1 / scale))
        assert torch.equal(smoothed, expected.weight), module
        if name == "w4a8_awq":
            assert float(found.input_amax[module]) == float(expected.input_quantizer.amax)


def traces(model: Any) -> tuple[Any, ...]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    flags = [(m.training, sorted(vars(m))) for m in model.modules()]
    pointers = [p.data_ptr() for p in model.parameters()]
    grads = [(id(p), p.requires_grad) for p in model.parameters()]
    config = copy.deepcopy(model.config.to_dict())
    return state, [type(m) for m in model.modules()], hooks, flags, pointers, grads, config


def same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    states = before[0].keys() == after[0].keys() and all(torch.equal(v, after[0][k]) for k, v in before[0].items())
    return states and before[1:] == after[1:]


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int8_sq", pytest.param("int4_awq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_model_is_as_it_was(family: str, scheme: str) -> None:
    model = built(family).train()
    model.register_forward_hook(lambda *_: None)
    before, answer = traces(model), model.eval()(IDS[0]).logits
    model.train()
    run(model, load_scheme(scheme, kv="fp8"))
    assert same(before, traces(model))
    assert torch.equal(model.eval()(IDS[0]).logits, answer)


@pytest.mark.parametrize("error", [RuntimeError("in the loop"), KeyboardInterrupt()])
@pytest.mark.parametrize("scheme", ["int8_sq", "int4_awq"])
def test_the_model_is_as_it_was_when_the_loop_raises(scheme: str, error: BaseException) -> None:
    model = built("gpt2")
    before = traces(model)
    calls = 0

    def loop(twin: Any) -> None:
        nonlocal calls
        calls += 1
        twin(IDS[0])
        raise error

    with pytest.raises(type(error)):
        run(model, load_scheme(scheme), loop)
    assert calls == 1 and same(before, traces(model))


def test_a_head_tied_to_the_embedding_is_smoothed_apart_from_it(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('base = "int8_sq"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int8_sq"')
    model = built("gpt2")
    twin = both(model, load_scheme(tmp_path / "r.toml")).model
    assert torch.equal(twin.transformer.wte.weight, model.transformer.wte.weight)
    assert not torch.equal(twin.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_same_inputs_give_the_same_bytes(scheme: str) -> None:
    first, second = (run(built("llama"), load_scheme(scheme)).digest for _ in range(2))
    assert first == second


def test_modelopts_presets_stay_as_they_are() -> None:
    names = [name for name in dir(mtq) if name.endswith("_CFG")]
    before = {name: copy.deepcopy(getattr(mtq, name)) for name in names}
    run(built("llama"), load_scheme("int8_sq", kv="fp8"))
    assert {name: getattr(mtq, name) for name in names} == before


def test_norms_embeddings_and_heads_carry_no_enabled_quantizer() -> None:
    model = built("bert")
    source = open_source(model)
    arch = structure(source.config, source.specs)
    scheme, twin = load_scheme("int8").bound(arch.sites), both(model, load_scheme("int8")).model
    enabled = {n.rpartition(".")[0] for n, m in twin.named_modules() if hasattr(m, "is_enabled") and m.is_enabled}
    assert enabled == {s.module for s in arch.sites if isinstance(scheme.format_of(s), Format)}
    assert not any("LayerNorm" in name or "embeddings" in name for name in enabled)


@pytest.mark.slow
def test_a_mixed_recipe_calibrates_each_part_as_its_scheme_alone(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        'base = "fp8"\n[[rule]]\nmodules = ["*.o_proj"]\nquant = "int8_sq"\n[[rule]]\nlayers = [1]\n'
        'modules = ["*.down_proj"]\nquant = "none"'
    )
    model = built("llama")
    mixed, plain, smooth = (run(model, load_scheme(name)) for name in (tmp_path / "r.toml", "fp8", "int8_sq"))
    assert set(mixed.smoothing_amax) == {f"model.layers.{n}.self_attn.o_proj" for n in range(2)}
    assert "model.layers.1.mlp.down_proj" not in mixed.input_amax
    for name, amax in mixed.input_amax.items():
        other = smooth if "o_proj" in name else plain
        assert float(amax) == float(other.input_amax[name]), name


@pytest.mark.slow
def test_held_out_answers_are_those_of_both_models() -> None:
    model = built("llama")
    held = run(model, load_scheme("fp8")).held_out
    assert held is not None and [b["input_ids"].tolist() for b in held.inputs] == [IDS[-1].tolist()]
    with torch.no_grad():
        logits = model(IDS[-1]).logits
        theirs = preset(model, mtq.FP8_DEFAULT_CFG)(IDS[-1]).logits
    assert held.source.shape == (80, 112)
    assert np.array_equal(held.source, logits.reshape(80, 112).numpy())
    assert np.array_equal(held.quantized, theirs.reshape(80, 112).numpy())
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 112), IDS[-1][:, 1:].reshape(-1))
    assert held.source_perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert held.quantized_perplexity and held.quantized_perplexity != held.source_perplexity


@pytest.mark.parametrize("scheme", ["nvfp4_mse", "nvfp4_wo_mse", "mxfp8", "mxfp4_wo"])
def test_schemes_that_modelopt_cannot_simulate_here_calibrate_all_the_same(scheme: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here: ModelOpt can simulate")
    model = built("llama")
    found, fp8 = run(model, load_scheme(scheme)), run(model, load_scheme("fp8"))
    assert found.held_out is not None and found.held_out.quantized.shape == (80, 0)
    if scheme == "nvfp4_mse":
        assert {k: float(v) for k, v in found.input_amax.items()} == {k: float(v) for k, v in fp8.input_amax.items()}
    else:
        assert found.input_amax == {}


def test_nvfp4_is_simulated_here_as_its_codes_say() -> None:
    """A linear layer of the fake-quantized model, against ModelOpt's packed codes of weight and input."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.manual_seed(0)
    fake = both(built("llama"), load_scheme("nvfp4")).model.get_submodule("model.layers.0.mlp.down_proj")
    x = torch.randn(7, fake.weight.shape[1]) * 3

    def dequantized(values: Any, amax: Any) -> Any:
        codes, scales, above = NVFP4QTensor.quantize(values, 16, weights_scaling_factor_2=amax.float() / (6 * 448))
        return codes.dequantize(torch.float32, scale=scales, double_scale=above, block_sizes={-1: 16})

    with torch.no_grad():
        weight = dequantized(fake.weight, fake.weight.abs().amax())
        want = torch.nn.functional.linear(dequantized(x, fake.input_quantizer.amax), weight)
        assert torch.equal(fake.weight_quantizer(fake.weight), weight)
        assert torch.equal(fake(x), want)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kv"), [("nvfp4_awq", None), ("w4a8_nvfp4_fp8", None), ("fp8", "nvfp4")])
def test_more_of_nvfp4_is_simulated_here(scheme: str, kv: str | None) -> None:
    held = run(built("mixtral"), load_scheme(scheme, kv=kv)).held_out
    assert held is not None and held.quantized.shape == held.source.shape
    assert not np.array_equal(held.quantized, held.source)
    assert np.corrcoef(held.quantized.reshape(-1), held.source.reshape(-1))[0, 1] > 0.97


SOUND = {
    "vocab_size": 97, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "num_mel_bins": 20, "pad_token_id": 0,
    "max_source_positions": 40, "max_target_positions": 48,
}  # fmt: skip
FED_FLOATS = {
    "ConvNextForImageClassification": ({"depths": [1] * 4, "hidden_sizes": [16, 24, 32, 40]}, (2, 3, 64, 64)),
    "WhisperForConditionalGeneration": (SOUND, (2, 20, 80)),
}


@grid({"name": list(FED_FLOATS), "dtype": [torch.bfloat16, torch.float32]})
def test_pixels_and_sounds_may_have_another_dtype_than_the_model(name: str, dtype: Any) -> None:
    fields, shape = FED_FLOATS[name]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**fields)).eval().to(dtype)
    ids = {"decoder_input_ids": IDS[0][:, :9] % 97} if name.startswith("Whisper") else {}
    inputs = [torch.randn(shape).bfloat16() for _ in range(3)]
    brain, single = (
        bridge.calibrate(model, "fp8", [{model.main_input_name: each.to(kind), **ids} for each in inputs])
        for kind in (torch.bfloat16, torch.float32)
    )
    assert brain.input_amax == single.input_amax and brain.input_amax
    assert brain.held_out and single.held_out
    assert (brain.held_out.inputs[0][model.main_input_name] == inputs[-1].float().numpy()).all()
    again = answer_again(open_source(model), brain.held_out)  # the file of a calibration has no bfloat16
    assert (again.source == brain.held_out.source).all() and (again.source == single.held_out.source).all()


def test_a_dead_input_gets_a_scale_of_one_and_is_told() -> None:
    model = built("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    found = run(model, load_scheme("fp8"))
    assert [(a.module, a.case, a.policy) for a in found.applied] == [("model.layers.1.mlp.down_proj", "zero", "floor")]
    assert float(found.input_amax["model.layers.1.mlp.down_proj"]) == 448.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_int8_smooths_beside_what_is_zero(family: str, dtype: str) -> None:
    """A column of a matrix, a matrix, and one behind an input that is zero; other statistics stay as they were."""
    model, int8 = built(family, getattr(torch, dtype)), load_scheme("int8")
    names = [n for n, p in model.named_parameters() if n.endswith(("down_proj.weight", "mlp.c_proj.weight"))]
    plain = run(model, int8)
    last = model.get_parameter(names[-1])
    with torch.no_grad():
        last[(slice(None), 3) if family == "llama" else (3, slice(None))] = 0
    found, module = run(model, int8), names[-1].removesuffix(".weight")
    assert float(found.pre_scale[module][3]) == np.float32(1e-4)
    assert np.array_equal(np.delete(found.pre_scale[module], 3), np.delete(plain.pre_scale[module], 3))
    assert all(np.array_equal(found.pre_scale[n], plain.pre_scale[n]) for n in plain.pre_scale if n != module)
    with torch.no_grad():  # of the first layer its input, too
        first = names[0].rsplit(".", 2)[0]
        for name, parameter in model.get_submodule(first).named_parameters():
            if not name.startswith("gate"):
                parameter.zero_()
        last.zero_()
    found = run(model, int8)
    assert all(np.isfinite(scale).all() and (scale > 0).all() for scale in found.pre_scale.values())
    assert [(a.module, a.case) for a in found.applied] == [(names[0].removesuffix(".weight"), "zero")]


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[int, int, str]] = []
    run(built("llama"), load_scheme("fp8"), progress=lambda *args: seen.append(args))
    first = [s for s in seen if s[2] == "calibrate"]
    assert [s[0] for s in first] == list(range(1, len(first) + 1)) and first[-1][0] == first[-1][1]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run(built("llama"), load_scheme("int8_sq", kv="fp8"))
    assert capfd.readouterr() == ("", "")


def test_a_small_amax_is_raised_in_the_statistics_and_in_the_twin_alike() -> None:
    model, scheme = built("gpt2"), load_scheme("fp8")
    found, plain = both(model, scheme, least=0.5), run(model, scheme)
    small = sorted(name for name, amax in plain.input_amax.items() if amax < 0.5)
    assert small and len(small) < len(plain.input_amax)
    assert [(a.module, a.case, a.policy, a.value) for a in found.calibration.applied] == [
        (name, "below 0.5", "floor", 0.5) for name in plain.input_amax if name in small
    ]
    for name, amax in plain.input_amax.items():
        expected = max(float(amax), 0.5)
        assert float(found.calibration.input_amax[name]) == expected
        assert float(found.model.get_submodule(name).input_quantizer.amax) == expected
