"""GPTQ by columns in the order of inputs, against its definition and plain rounding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bridge
from bridge.calibration.data import Sampling, prepare
from bridge.calibration.importance import columns
from bridge.calibration.importance.columns import ColumnCodes, column_codes
from bridge.calibration.job import CalibrationJob
from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.requirements import token_warnings
from bridge.core.errors import CalibrationError, PlanError, SchemeError
from bridge.core.values import Numeric, Site, TensorSpec
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.codec.packing import unpacked_codes
from bridge.quant.codec.search import SCALES, searched_scales
from bridge.quant.schemes.load import load_scheme
from bridge.sources.live_models.checkpoint_names import LiveSlice, Origin
from bridge.sources.opening import open_source
from tests.blocks import ROOT
from tests.models.decoder_families import build

BLOCK = 16
NUMERIC = Numeric("int4", "block", (BLOCK,), search="either")
NVFP4 = Numeric("float4_e2m1fn", "block", (BLOCK,), "float8_e4m3fn", search="weighted")
MXFP4 = Numeric("float4_e2m1fn", "block", (BLOCK,), "float8_e8m0fnu", search="weighted")
GRIDS = [NUMERIC, NVFP4, MXFP4]
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
}  # fmt: skip
BATCHES = [{"input_ids": torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(n))} for n in range(3)]


def problem(rows: int, cols: int, seed: int = 0, numeric: Numeric = NUMERIC) -> tuple[Any, Any, Any]:
    """A weight, inputs that are alike and of very different size, and scales of the least weighted error."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(300, cols, generator=random) @ torch.randn(cols, cols, generator=random)
    x *= torch.logspace(-1, 1, cols)[torch.randperm(cols, generator=random)]
    weight = torch.randn(rows, cols, generator=random)
    divisors = SCALES["float8_e4m3fn"] * np.float32(weight.abs().max() / (6 * 448)) if numeric.two_level else None
    scales = searched_scales(weight.numpy(), "float32", numeric, x.square().mean(0).numpy(), divisors)
    return weight, x, torch.from_numpy(scales)


def nearest(quotient: Any, numeric: Numeric) -> Any:
    """The values of the nearest codes."""
    if numeric.dtype == "int4":
        return quotient.round().clamp(-8, 7)
    at = (quotient.abs().double()[..., None] - MAGNITUDES).abs().argmin(-1)
    return (MAGNITUDES[at] * quotient.sign()).to(quotient.dtype)


def values_of(codes: Any, numeric: Numeric) -> Any:
    if numeric.dtype == "int4":
        return codes.double()
    return MAGNITUDES[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)


def by_definition(weight: Any, gram: Any, scales: Any, damp: float, numeric: Numeric) -> Any:
    """Each column is rounded, then all that are left are fitted anew by least squares, in float64."""
    wide, hessian = weight.double(), gram.double()
    hessian = hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    codes, current = torch.zeros_like(wide), wide.clone()
    for at, column in enumerate(order):
        step = scales[:, column // BLOCK].double()
        codes[:, column] = nearest(current[:, column] / step, numeric)
        current[:, column] = codes[:, column] * step
        left = order[at + 1 :]
        if len(left):
            done = order[: at + 1]
            moved = (wide - current)[:, done] @ hessian[done][:, left]
            current[:, left] = wide[:, left] + moved @ torch.linalg.inv(hessian[left][:, left])
    return codes


@pytest.mark.parametrize("numeric", GRIDS)
def test_codes_are_those_of_the_definition(numeric: Numeric) -> None:
    weight, x, scales = problem(12, 48, numeric=numeric)
    got = column_codes(weight, x.T @ x, scales, numeric, 0.01)
    want = by_definition(weight, x.T @ x, scales, 0.01, numeric)
    assert got.dtype == torch.int8
    # float32 against float64: a few are near ties
    assert (values_of(got, numeric) == want).float().mean() > 0.995


@pytest.mark.parametrize("numeric", GRIDS)
@pytest.mark.parametrize("cols", [48, 320])  # within COLUMNS, and beyond
def test_outputs_err_less_than_with_the_nearest_codes(cols: int, numeric: Numeric) -> None:
    weight, x, scales = problem(32, cols, seed=cols, numeric=numeric)
    wide = scales.repeat_interleave(BLOCK, 1)

    def error(values: Any) -> float:
        return float((x @ (values.float() * wide - weight).T).norm())

    codes = column_codes(weight, x.T @ x, scales, numeric, 0.01)
    assert error(values_of(codes, numeric)) < 0.75 * error(nearest(weight / wide, numeric))


@pytest.mark.parametrize("numeric", GRIDS)
def test_a_block_of_zeros_and_a_silent_input_have_codes(numeric: Numeric) -> None:
    weight, x, scales = problem(8, 32, numeric=numeric)
    weight[3, :BLOCK], scales[3, 0], x[:, 5] = 0, 0, 0
    codes = column_codes(weight, x.T @ x, scales, numeric, 0.01)
    assert not (codes[3, :BLOCK] & 7).any() and torch.isfinite(codes.float()).all()


@pytest.fixture(scope="module")
def model() -> Any:
    return build("LlamaForCausalLM", torch.float32, **LLAMA)


@pytest.fixture(scope="module")
def calibration(model: Any) -> Calibration:
    return bridge.calibrate(model, "int4:gptq", data=BATCHES, samples=None)


def test_readers_of_one_input_share_its_products(model: Any, calibration: Calibration) -> None:
    layer = "model.layers.0.self_attn."
    squares = [calibration.input_square[f"{layer}{name}_proj"] for name in "qkv"]
    assert np.array_equal(squares[0], squares[1]) and np.array_equal(squares[1], squares[2])
    assert set(calibration.weight_codes) == set(calibration.input_square)


class Seen(torch.overrides.TorchFunctionMode):
    """The inputs of products with parts of some weights, by the address of the part."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, list[Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.inputs.setdefault(args[1].data_ptr(), []).append(args[0].clone())
        return func(*args, **(kwargs or {}))


def codes_of_a_linear(weight: Any, inputs: list[Any], quant: str) -> np.ndarray:
    """The codes that an nn.Linear with this weight gets from these inputs."""
    linear = torch.nn.ModuleDict({"m": torch.nn.Linear(*weight.shape[::-1], bias=False)})
    linear["m"].weight.data = weight.clone()
    scheme = load_scheme(quant)
    site, spec = Site("m", "m.weight", "out_in"), TensorSpec("m.weight", tuple(weight.shape), "float32")
    origins = {"m.weight": Origin(spec, (LiveSlice("m.weight"),))}
    watch = ColumnCodes([QuantizerBinding(site, scheme.format, "m", "weight")], origins, scheme)
    watch.prepare(linear)
    watch.run(lambda model: [model["m"](rows) for rows in inputs], linear)
    return np.asarray(watch.codes["m"])


@pytest.mark.parametrize("quant", ["int4:gptq", "mxfp4_wo:gptq"])
def test_an_expert_has_the_codes_of_a_linear_with_its_weight_and_its_tokens(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "EVERY_EXPERT", 1)
    model = build("MixtralForCausalLM", torch.float32, **LLAMA, num_hidden_layers=1).eval()
    made = bridge.calibrate(model, quant, data=BATCHES, samples=None, progress=False)
    model.set_experts_implementation("eager")
    with torch.no_grad(), Seen() as seen:
        for batch in BATCHES[:-1]:  # the last is held out
            model(**batch)
    experts, compared = model.model.layers[0].mlp.experts, 0
    for number, (joined, down) in enumerate(
        zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True)
    ):
        half = len(joined) // 2
        for leaf, weight, read in (("w1", joined[:half], joined), ("w3", joined[half:], joined), ("w2", down, down)):
            got = made.weight_codes[f"model.layers.0.block_sparse_moe.experts.{number}.{leaf}"]
            want = codes_of_a_linear(weight, seen.inputs[read.data_ptr()], quant)
            assert np.array_equal(np.asarray(got[0 : got.shape[0]]), want), (number, leaf)
            compared += 1
    assert compared == 3 * len(experts.gate_up_proj) and not made.applied


def test_an_expert_of_a_stack_has_such_codes_in_the_axes_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "EVERY_EXPERT", 1)
    model = build("Llama4ForCausalLM", torch.float32, **LLAMA, intermediate_size_mlp=128).eval()
    (name, experts), *_ = [(name, one) for name, one in model.named_modules() if name.endswith(".experts")]
    made = bridge.calibrate(model, "int4:gptq", data=BATCHES, samples=None, progress=False)
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].view(len(experts.gate_up_proj), -1, 128)))
    with torch.no_grad():
        for batch in BATCHES[:-1]:
            model(**batch)
    for number, stored in enumerate(experts.gate_up_proj.detach()):  # [in, out]
        inputs = [one[number][one[number].abs().amax(-1) > 0] for one in seen]  # those of other experts are zero
        want = unpacked_codes(codes_of_a_linear(stored.T.contiguous(), inputs, "int4:gptq"), "int4", "in", 128)
        packed = made.weight_codes[f"{name}.gate_up_proj.{number}"]
        got = unpacked_codes(np.asarray(packed[0 : packed.shape[0]]), "int4", "in", stored.shape[1])
        assert np.array_equal(got.T, want), number


def test_an_expert_with_few_tokens_is_rounded_as_by_importance_alone_and_told(tmp_path: Any) -> None:
    model = build("MixtralForCausalLM", torch.float32, **LLAMA, num_hidden_layers=1)
    options: dict[str, Any] = {"data": BATCHES, "samples": None, "progress": False, "format": "compressed-tensors"}
    report = bridge.convert(model, "hf", "int4:gptq", tmp_path / "gptq", **options)
    bridge.convert(model, "hf", "int4:imatrix", tmp_path / "imatrix", verify=False, **options)
    made = Calibration.load(tmp_path / "gptq" / "bridge" / "calibration.safetensors")
    (tokens,) = made.expert_tokens.values()
    assert report.passed and min(tokens) < columns.EVERY_EXPERT <= max(tokens)
    by_rule = [load_file(tmp_path / rule / "model.safetensors") for rule in ("gptq", "imatrix")]
    for number, count in enumerate(tokens):
        module = f"model.layers.0.block_sparse_moe.experts.{number}.w1"
        few = 0 < count < columns.EVERY_EXPERT
        assert few == (f"{module} codes" in report.policies)
        same = np.array_equal(*(one[f"{module}.weight_packed"] for one in by_rule))
        assert same == (count < columns.EVERY_EXPERT), (number, count)


@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "gptq"])
def test_chosen_codes_are_written_and_proved(model: Any, calibration: Calibration, format_: str, tmp_path: Any) -> None:
    report = bridge.convert(
        model, "hf", "int4:gptq", tmp_path / "out", calib=calibration, format=format_, progress=False
    )
    assert report.passed and report.parity
    counts = {count.what: count for count in report.parity.counts}
    chosen = counts["codes that are those that calibration chose"]
    assert chosen.n == chosen.of > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"), [("Phi3ForCausalLM", "hf"), ("MixtralForCausalLM", "hf"), ("LlamaForCausalLM", "gguf")]
)
def test_joined_matrices_experts_and_repeated_scales_are_proved(name: str, target: str, tmp_path: Any) -> None:
    gguf = target == "gguf"  # needs a tokenizer
    other = ROOT / "examples/models/tiny-llama" if gguf else build(name, torch.bfloat16, **LLAMA)
    options: dict[str, Any] = {} if gguf else {"format": "compressed-tensors"}
    options |= {"data": BATCHES, "samples": None, "progress": False}
    report = bridge.convert(other, target, "int4:gptq", tmp_path / "out", **options)
    assert report.parity and report.passed
    counts = {count.what: (count.n, count.of) for count in report.parity.counts}
    assert counts["codes that are those that calibration chose"][1] > 0
    assert all(n == of for n, of in counts.values())


@pytest.mark.parametrize(
    ("quant", "target"),
    [("nvfp4_wo:gptq", "hf"), ("nvfp4_wo:gptq", "gguf"), ("mxfp4_wo:gptq", "hf"), ("mxfp4_wo:gptq", "gguf")],
)
def test_fp4_codes_are_written_under_the_scales_that_they_were_chosen_for(
    quant: str, target: str, tmp_path: Any
) -> None:
    batches = [{"input_ids": batch["input_ids"] % 97} for batch in BATCHES]
    options: dict[str, Any] = {"format": "compressed-tensors"} if target == "hf" else {}
    options |= {"data": batches, "samples": None, "progress": False}
    report = bridge.convert(ROOT / "examples/models/tiny-llama", target, quant, tmp_path / "out", **options)
    assert report.passed and report.parity and not report.findings
    counts = {count.what: (count.n, count.of) for count in report.parity.counts}
    assert counts["codes that are those that calibration chose"][1] > 0
    assert all(n == of for n, of in counts.values())


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["nvfp4:gptq", "nvfp4:imatrix"])
def test_inputs_are_measured_beside_the_codes(model: Any, quant: str, tmp_path: Any) -> None:
    report = bridge.convert(model, "hf", quant, tmp_path / "out", data=BATCHES, samples=None, progress=False)
    assert report.passed and report.parity and not report.findings
    made = Calibration.load(tmp_path / "out" / "bridge" / "calibration.safetensors")
    assert set(made.input_amax) == set(made.input_square)
    assert bool(made.weight_codes) == bool(made.block_scales) == (quant == "nvfp4:gptq")


@pytest.mark.parametrize(("quant", "sequence", "told"), [("int4:gptq", 8, True), ("int4:gptq", 128, False)])
def test_fewer_tokens_than_inputs_are_told_with_the_rows_that_it_takes(quant: str, sequence: int, told: bool) -> None:
    source, scheme = open_source(ROOT / "examples/models/tiny-llama"), load_scheme(quant)
    data = prepare(None, source, Sampling(samples=16, sequence=sequence))
    said = token_warnings(CalibrationJob(source, structure_of(source), scheme, data))
    assert bool(said) == told
    if told:  # ffn = 384, 128 tokens
        assert "samples=48 (--samples 48)" in said[0] and "int4:imatrix" in said[0]


def test_another_models_codes_are_refused(model: Any, calibration: Calibration, tmp_path: Any) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.01)
    with pytest.raises(bridge.core.errors.BridgeError, match="other weights"):
        bridge.convert(other, "hf", "int4:gptq", tmp_path / "out", calib=calibration, format="awq", progress=False)


@pytest.mark.parametrize("other", ["int4_gptq", "blocks of 64", "positive"])
def test_codes_of_another_rounding_are_refused(model: Any, calibration: Calibration, other: str, tmp_path: Any) -> None:
    scheme = load_scheme("int4_gptq" if other == "int4_gptq" else "int4:gptq")
    change = {"blocks of 64": {"block": (64,)}, "positive": {"search": "positive"}}.get(other, {})
    scheme = replace(scheme, weight=(replace(scheme.weight[0], **change),))
    options = {"calib": calibration, "format": "compressed-tensors", "verify": False, "progress": False}
    with pytest.raises(
        CalibrationError,
        match=r"is for gptq int4 block 128 with scales of either sign, and .* calibrate for",
    ):
        bridge.convert(model, "hf", scheme, tmp_path / "out", **options)


def test_the_cache_is_calibrated_beside_them(model: Any) -> None:
    found = bridge.calibrate(model, "int4:imatrix", data=BATCHES, samples=None, kv="fp8")
    attention = [f"model.layers.{at}.self_attn" for at in range(model.config.num_hidden_layers)]
    assert sorted(found.k_amax) == sorted(found.v_amax) == attention
    assert all(float(amax) > 0 for amax in (*found.k_amax.values(), *found.v_amax.values()))


def test_a_cache_beside_what_modelopt_cannot_simulate_is_not_measured(model: Any) -> None:
    with pytest.raises(CalibrationError, match="int4:gptq cannot be measured: ModelOpt has no quantizer"):
        bridge.sensitivity(model, "int4:gptq", data=BATCHES, kv="fp8")


@pytest.mark.parametrize(
    ("target", "options", "error"),
    [("trt", {}, PlanError), ("hf", {"format": "modelopt"}, SchemeError), ("edgellm", {}, SchemeError)],
)
def test_layouts_with_positive_scales_refuse_codes_for_either_sign(
    model: Any, target: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"(?s)codes for scales of either sign.*int4:imatrix"):
        bridge.plan(model, target, "int4:gptq", **options)
