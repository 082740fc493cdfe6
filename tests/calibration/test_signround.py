"""SignRound: AutoRound's own quantizer and its gradients, and what learning does to a layer and to a model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.calibration.importance.signround import MARGIN, OF_FACTORS, Call, LearnedMatrix, learn
from bridge.calibration.walk.resume import Partial
from bridge.core.errors import BridgeError, CalibrationError, SchemeError
from bridge.core.values import Numeric
from bridge.quant.calibration import Calibration
from bridge.quant.codec.search import searched_scales
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.streaming.scales import clip_of
from tests.models.decoder_families import build
from tests.oracles import autoround_golden

NUMERIC = Numeric("int4", "block", (autoround_golden.BLOCK,), search="either")
LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
}  # fmt: skip
BATCHES = [{"input_ids": torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(n))} for n in range(3)]


def scheme(steps: int = 6, rule: str = "int4:signround", block: int = 32) -> Scheme:
    made = load_scheme(rule)
    options = (
        tuple(sorted({**dict(made.options), "steps": steps}.items())) if rule == "int4:signround" else made.options
    )
    return replace(made, weight=(replace(made.weight[0], block=(block,)),), options=options)


def golden_matrix(turned: bool = False) -> tuple[LearnedMatrix, Any]:
    given = {name: torch.from_numpy(array) for name, array in autoround_golden.problem().items()}
    nearest = (given["weight"] / given["scales"].repeat_interleave(autoround_golden.BLOCK, 1)).round().clamp(-8, 7)
    matrix = LearnedMatrix(given["weight"], given["scales"], nearest.to(torch.int8), NUMERIC, turned)
    assert not matrix.offset.any()
    matrix.factor, matrix.offset = given["factor"].clone(), given["offset"].clone()
    return matrix, given["gradient"]


@pytest.mark.parametrize("turned", [False, True])
def test_values_and_a_step_are_those_of_autoround(turned: bool) -> None:
    matrix, gradient = golden_matrix(turned)
    golden = json.loads(autoround_golden.GOLDEN.read_text())
    values = matrix.values(torch.float32)
    codes = matrix.codes()
    assert autoround_golden.digest(codes.to(torch.int8).numpy()) == golden["codes"]
    assert torch.equal(values.T if turned else values, codes * matrix.wide(matrix.scales * matrix.factor))
    offset, factor = matrix.offset.clone(), matrix.factor.clone()
    matrix.step(gradient.T if turned else gradient, 2.0**-6)
    moved = {"offset": (offset - matrix.offset) * 2**6, "factor": (factor - matrix.factor) * (2**6 / OF_FACTORS)}
    for name, one in moved.items():
        assert autoround_golden.digest(one.round().to(torch.int8).numpy()) == golden[name]


def test_a_start_has_the_codes_that_it_is_given() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    scales = torch.from_numpy(searched_scales(weight.numpy(), "float32", NUMERIC, np.ones(32, np.float32)))
    scales[2, 1], weight[2, 16:] = 0, 0
    codes = torch.randint(-8, 8, (8, 32), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    codes[2, 16:] = 0
    matrix = LearnedMatrix(weight, scales, codes, NUMERIC)
    assert torch.equal(matrix.codes().to(torch.int8), codes)
    for _ in range(20):
        matrix.step(torch.ones(8, 32), 0.05)
    assert not matrix.codes()[2, 16:].any() and bool((matrix.factor[2, 1] == 1).all())  # a block of zeros stays
    assert MARGIN < 0.5


class Layer(torch.nn.Module):
    """Two matrices with a nonlinear function between; the second is stored [in, out]."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(one, requires_grad=False) for one in weight)

    def forward(self, x: Any) -> tuple[Any]:
        return (x + torch.nn.functional.silu(x @ self.first.T) @ self.second,)


def layer_problem() -> tuple[Layer, dict[str, LearnedMatrix], list[Call]]:
    random = torch.Generator().manual_seed(3)
    layer = Layer([torch.randn(48, 32, generator=random) / 6, torch.randn(48, 32, generator=random) / 6])
    matrices = {}
    for name, turned in (("first", False), ("second", True)):
        weight = getattr(layer, name).T.contiguous() if turned else getattr(layer, name).clone()
        scales = torch.from_numpy(searched_scales(weight.numpy(), "float32", NUMERIC, np.ones(weight.shape[1], "f4")))
        wide = scales.repeat_interleave(16, 1)
        matrices[name] = LearnedMatrix(
            weight, scales, (weight / wide).round().clamp(-8, 7).to(torch.int8), NUMERIC, turned
        )
    inputs = [torch.randn(8, 6, 32, generator=random) for _ in range(3)]
    rows = torch.arange(40)  # the last are padding
    return layer, matrices, [Call((x,), {}, layer(x)[0], rows) for x in inputs]


def test_learning_lessens_the_error_of_the_output_and_padding_does_not_count() -> None:
    layer, matrices, calls = layer_problem()
    before, after = learn(layer, matrices, calls, 50, 1.0, 0)
    assert after < 0.8 * before
    spoilt = [replace(call, target=call.target.clone()) for call in calls]
    for call in spoilt:
        call.target.reshape(-1, 32)[40:] = 1e6
    layer, others, _ = layer_problem()
    assert learn(layer, others, spoilt, 50, 1.0, 0) == (before, after)


def test_what_does_not_lessen_the_error_is_dropped() -> None:
    layer, matrices, calls = layer_problem()
    codes = {name: one.codes() for name, one in matrices.items()}
    before, after = learn(layer, matrices, calls, 1, 1.0, 0)  # one step, by a whole code
    assert before == after
    assert all(torch.equal(one.codes(), codes[name]) for name, one in matrices.items())


@pytest.fixture(scope="module")
def model() -> Any:
    return build("LlamaForCausalLM", torch.float32, **LLAMA)


@pytest.fixture(scope="module")
def calibration(model: Any) -> Calibration:
    return bridge.calibrate(model, scheme(), data=BATCHES, samples=None)


def test_each_layer_is_learned_and_says_its_loss(model: Any, calibration: Calibration) -> None:
    layers = {f"model.layers.{n}" for n in range(model.config.num_hidden_layers)}
    assert set(calibration.learned_loss) == layers
    losses = [*calibration.learned_loss.values()]
    assert all(after <= before for before, after in losses) and any(after < 0.9 * before for before, after in losses)
    assert set(calibration.weight_codes) == set(calibration.scale_factor) == set(calibration.input_square)
    assert any("SignRound" in line for line in calibration.lines())


def test_outputs_are_nearer_to_the_source_than_with_gptq(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    def error(rule: str, calib: Calibration | None) -> float:
        out = tmp_path / rule.partition(":")[2]
        options = {"data": BATCHES, "samples": None} if calib is None else {"calib": calib}
        quant = scheme(rule=rule)
        bridge.convert(model, "hf", quant, out, format="compressed-tensors", verify=False, progress=False, **options)
        bridge.convert(out, "hf", "none", tmp_path / f"{out.name} plain", verify=False, progress=False)
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(tmp_path / f"{out.name} plain")
        with torch.no_grad():
            return sum(float((model(**b).logits - made(**b).logits).square().sum()) for b in BATCHES)

    assert error("int4:signround", calibration) < error("int4:gptq", None)


def test_the_same_run_gives_the_same_bytes_and_a_killed_one_goes_on(
    model: Any, calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, keep = [], Partial.keep

    def stop(*args: Any) -> bool:
        done = keep(*args)
        kept.append(done)
        if len(kept) == 1:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Partial, "keep", stop)
        bridge.calibrate(model, scheme(), data=BATCHES, samples=None, partial=tmp_path / "partial")
    with pytest.warns(bridge.core.errors.BridgeWarning, match="continues after block 1"):
        again = bridge.calibrate(model, scheme(), data=BATCHES, samples=None, partial=tmp_path / "partial")
    assert again.digest == calibration.digest
    assert not (tmp_path / "partial").exists()


@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "gptq"])
def test_codes_and_scales_are_written_and_proved(
    model: Any, calibration: Calibration, format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = bridge.convert(model, "hf", scheme(), tmp_path / "out", calib=calibration, format=format_, progress=False)
    assert report.passed and report.parity
    assert any(note.startswith("SignRound left ") and "model.layers.1 " in note for note in report.notes)
    counts = {count.what: count for count in report.parity.counts}
    for what in ("codes that are those that calibration chose", "codes searched again with their importance, the same"):
        assert counts[what].n == counts[what].of > 0
    # a file with other scales fails the proof
    factor = {name: array * np.float32(1.02) for name, array in calibration.scale_factor.items()}
    moved = replace(calibration, scale_factor=factor)
    with monkeypatch.context() as patch:
        patch.setattr("bridge.verification.expected.clip_of", partial(wrong_clip, moved))
        other = bridge.convert(
            model, "hf", scheme(), tmp_path / "other", calib=calibration, format=format_, progress=False
        )
    assert not other.passed


def wrong_clip(calibration: Calibration, step: Any, specs: Any, _: Any) -> Any:
    return clip_of(step, specs, calibration)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Phi3ForCausalLM", "MixtralForCausalLM"])
def test_joined_matrices_and_experts_are_proved(name: str, tmp_path: Path) -> None:
    other = build(name, torch.bfloat16, **LLAMA)
    options: dict[str, Any] = {"format": "compressed-tensors", "data": BATCHES, "samples": None, "progress": False}
    report = bridge.convert(other, "hf", scheme(), tmp_path / "out", **options)
    assert report.parity and report.passed


def test_wrong_steps_and_another_codes_are_refused(model: Any, calibration: Calibration, tmp_path: Path) -> None:
    for steps in ("0", "1.5", "20000"):
        (tmp_path / "own.toml").write_text(f'base = "int4:signround"\n[options]\nsteps = {steps}\n')
        with pytest.raises(SchemeError, match=r"steps = .*; expected a whole number, 1 to 10000"):
            load_scheme(tmp_path / "own.toml")
    (tmp_path / "own.toml").write_text('base = "int4:signround"\n[options]\nsteps = 20\n')
    assert dict(load_scheme(tmp_path / "own.toml").options)["steps"] == 20
    with pytest.raises(CalibrationError, match=r"is for signround int4 block 32 .* calibrate for"):
        bridge.convert(
            model, "hf", scheme(rule="int4:gptq"), tmp_path / "out", calib=calibration, format="awq", progress=False
        )
    with pytest.raises(BridgeError, match="codes for scales of either sign"):
        bridge.plan(model, "hf", scheme(), format="modelopt")


def test_a_loop_of_the_users_own_is_refused(model: Any) -> None:
    with pytest.raises(CalibrationError, match=r"SignRound .*layer by layer.*give batches as data="):
        bridge.calibrate(model, scheme(), data=lambda model: [model(**batch) for batch in BATCHES])
