"""Pre-scales that go into norms and previous matrices: the folded model is the function that the source is."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

import bridge  # noqa: E402
from bridge.core.arrays import Buffers  # noqa: E402
from bridge.core.dtypes import to_float32  # noqa: E402
from bridge.core.errors import BridgeError  # noqa: E402
from bridge.core.values import Numeric  # noqa: E402
from bridge.planning.plan import Plan  # noqa: E402
from bridge.quant.calibration import Calibration, Provenance  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.quant.schemes.scheme import Scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.streaming.context import ConversionContext, FileSettings  # noqa: E402
from bridge.streaming.encode import prepared_weight, write_plain  # noqa: E402
from bridge.streaming.scales import smoothing_of  # noqa: E402
from bridge.targets.hf.compressed_tensors import quantization_config  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

AWQ = dataclasses.replace(load_scheme("int4_awq"), weight=(Numeric("int4", "block", (20,)),))
SCHEMES: dict[str, Scheme] = {"awq": AWQ, "smoothquant": load_scheme("int8")}
FOLDED = {
    "LlamaForCausalLM": 4,
    "Qwen2ForCausalLM": 4,
    "Qwen3ForCausalLM": 4,
    "Gemma2ForCausalLM": 4,
    "Gemma3ForCausalLM": 4,
    "MistralForCausalLM": 4,
    "Phi3ForCausalLM": 4,
    "MixtralForCausalLM": 2,  # experts are not smoothed
}
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


def source_of(family: str, root: Path, **fields: int) -> Path:
    model = build(family, torch.float32, **fields)
    random = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # both are constants in a new model
            parameter.data += torch.randn(parameter.shape, generator=random) * 0.3
    model.save_pretrained(root)
    return root


def calibration(plan: Plan) -> Calibration:
    """Pre-scales between 1/4 and 4, another for each channel and module."""
    random = np.random.Generator(np.random.Philox(3))
    amax, scales = {}, {}
    for step in plan.quantized:
        assert step.site
        in_ = plan.sources[step.source].shape[1]
        amax[step.site.module] = np.array(2.5, np.float32)
        scales[step.site.module] = np.exp2(random.uniform(-2, 2, in_)).astype(np.float32)
    return Calibration(Provenance("", "", "", "", "", "", 0, 0), amax, pre_scale=scales)


def folded_state(source: Path, plan: Plan, calib: Calibration) -> dict[str, Any]:
    """The weights of a plan as they are before they are coded."""
    opened, buffers, state = open_source(source), Buffers(), {}
    context = ConversionContext(plan, opened, calib, None, 1 << 30, None, FileSettings({}, 8))  # type: ignore[arg-type]
    for step in plan.steps:
        if step.format:
            _, rows, prepared = prepared_weight(step, context, buffers)
            parts = [prepared.rows(part).copy() for _, pieces in rows.pieces() for part in pieces]
            state[step.source] = torch.from_numpy(np.concatenate(parts))
            continue
        pieces: list[Any] = []
        write_plain(step, context, buffers, lambda _, array, __, into=pieces: into.append(array.copy()))
        spec = step.outputs[0].spec
        flat = np.concatenate([to_float32(piece.reshape(-1), spec.dtype) for piece in pieces])
        state[spec.name] = torch.from_numpy(flat.reshape(spec.shape))
    return state


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FOLDED)
def test_a_folded_model_computes_what_its_source_does(tmp_path: Path, family: str, scheme: str) -> None:
    source = source_of(family, tmp_path)
    plan = bridge.plan(source, target="hf", quant=SCHEMES[scheme], format="compressed-tensors")
    assert_same_function(source, plan, FOLDED[family], tmp_path / "folded")


def assert_same_function(source: Path, plan: Plan, feeds: int, folded: Path) -> dict[str, Any]:
    """Hold the model that has a plan's weights, before they are coded, to its source; return those that changed."""
    assert sum(bool(step.feeds and step.feed_as_reader) for step in plan.quantized) == feeds
    state = folded_state(source, plan, calibration(plan))
    plain = load_file(source / "model.safetensors")
    changed = {name: state[name] for name in state if not torch.equal(state[name], plain[name])}
    folded.mkdir()
    save_file(state, folded / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", folded)
    with torch.no_grad():
        before, after = (open_source(root).load_model()(IDS).logits for root in (source, folded))
    assert len(changed) >= 3 * feeds  # or nothing was folded, and equality says nothing
    assert (after - before).abs().max() < 2e-5 * before.abs().max()
    return changed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_grouped_queries_each_row_of_v_takes_a_pre_scale_of_its_own(tmp_path: Path, scheme: str) -> None:
    """No mean and no least: the pre-scale that o has is the one that v is multiplied by, channel by channel."""
    source = source_of("LlamaForCausalLM", tmp_path / "source", num_key_value_heads=6)
    plan = bridge.plan(source, target="hf", quant=SCHEMES[scheme], format="compressed-tensors")
    assert {step.feed_as_reader.repeat for step in plan.quantized if step.feed_as_reader} == {1}
    assert not any("query heads" in note for note in plan.notes)
    changed = assert_same_function(source, plan, 4, tmp_path / "folded")
    step = next(s for s in plan.quantized if s.site and s.site.module.endswith("0.self_attn.o_proj"))
    smoothing = smoothing_of(step, "float32", calibration(plan))
    assert smoothing and len({*smoothing.scale().tolist()}) == 60
    plain = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.allclose(changed[name] * torch.from_numpy(smoothing.scale()), plain[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "last", "norm"),
    [
        ("Starcoder2ForCausalLM", "c_proj", "post_attention_layernorm"),
        ("NemotronForCausalLM", "down_proj", "post_attention_layernorm"),  # it multiplies by 1 + weight
    ],
)
def test_the_first_matrix_of_a_plain_mlp_folds_into_a_norm_with_a_bias(
    tmp_path: Path, family: str, last: str, norm: str
) -> None:
    source, recipe = source_of(family, tmp_path / "source"), tmp_path / "recipe.toml"
    recipe.write_text(f'base = "int8"\n[[rule]]\nmodules = ["*.mlp.{last}"]\nquant = "int8_wo"\n')
    plan = bridge.plan(source, target="hf", quant=recipe, format="compressed-tensors")
    changed = assert_same_function(source, plan, 2, tmp_path / "folded")
    assert {f"model.layers.0.{norm}.weight", f"model.layers.0.{norm}.bias"} <= changed.keys()


def test_a_matrix_stored_in_out_has_no_place_for_the_pre_scale_of_its_reader(tmp_path: Path) -> None:
    """GPT-2's c_attn has q, k and v behind each other along `out`, its last axis."""
    source = source_of("GPT2LMHeadModel", tmp_path)
    with pytest.raises(BridgeError, match=r"attn\.c_proj.*no place for its pre-scales"):
        bridge.plan(source, target="hf", quant="int8", format="compressed-tensors")


def test_an_activation_between_two_matrices_is_refused_with_the_rule_that_helps(tmp_path: Path) -> None:
    source = source_of("Starcoder2ForCausalLM", tmp_path)
    with pytest.raises(BridgeError, match=r"mlp\.c_proj: no place for its pre-scales \(awq\).*modules = \[.*c_proj"):
        bridge.plan(source, target="hf", quant=AWQ, format="compressed-tensors")


@pytest.mark.slow
def test_an_architecture_without_table_is_refused_since_nothing_says_what_feeds_what(tmp_path: Path) -> None:
    source = source_of("Olmo2ForCausalLM", tmp_path)
    with pytest.raises(BridgeError, match="no table that says which matrix makes its input"):
        bridge.plan(source, target="hf", quant=AWQ, format="compressed-tensors")


def test_the_rule_of_the_message_is_enough(tmp_path: Path) -> None:
    source, recipe = source_of("Starcoder2ForCausalLM", tmp_path / "source"), tmp_path / "recipe.toml"
    recipe.write_text('base = "int8"\n[[rule]]\nmodules = ["*.mlp.c_proj"]\nquant = "int8_wo"\n')
    plan = bridge.plan(source, target="hf", quant=recipe, format="compressed-tensors")
    assert len(plan.quantized) == 12 and not any(o.part == "pre_quant_scale" for o in plan.outputs)


def test_experts_which_have_no_pre_scales_stand_in_the_group_of_the_others(tmp_path: Path) -> None:
    """vLLM looks for a fused matrix by the names of its parts only where the model's class lists them: not Qwen3's."""
    plan = bridge.plan(source_of("MixtralForCausalLM", tmp_path), "hf", AWQ, format="compressed-tensors")
    assert {step.format.algorithm for step in plan.quantized if step.format} == {"awq", "max"}
    config = quantization_config(plan)
    assert config and [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]


def test_heads_that_share_rows_share_a_scale_and_the_plan_says_so(tmp_path: Path) -> None:
    source = source_of("LlamaForCausalLM", tmp_path)
    awq, smooth = (bridge.plan(source, target="hf", quant=q, format="compressed-tensors") for q in SCHEMES.values())
    assert any("the mean of the pre-scales of 3 query heads" in note for note in awq.notes)
    assert any("the least of the pre-scales of 3 query heads" in note for note in smooth.notes)


def test_a_smaller_factor_never_leaves_the_calibrated_range(tmp_path: Path) -> None:
    """The input scale was measured with each head's own factor: with a larger one inputs would saturate."""
    source = source_of("LlamaForCausalLM", tmp_path)
    plan = bridge.plan(source, target="hf", quant="int8", format="compressed-tensors")
    calib = calibration(plan)
    for step in plan.quantized:
        if (feed := step.feed_as_reader) and feed.repeat > 1:
            smoothing = smoothing_of(step, "float32", calib)
            assert smoothing and step.site
            assert (smoothing.scale() <= calib.pre_scale[step.site.module]).all()
            assert len({*smoothing.scale().tolist()}) == plan.sources[step.source].shape[1] // feed.repeat
