"""Training through codes: the model that runs is the one that is written, and its gradients are ModelOpt's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.arrays import Buffers  # noqa: E402
from bridge.core.errors import SchemeError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.sources.live_models.checkpoint_names import live_names, tied_names  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.verification.simulated.codes import Codes  # noqa: E402
from bridge.verification.simulated.inputs import FakeInputs, InputCodes, input_codes  # noqa: E402
from bridge.workflows.distill.student import Student  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

LLAMA = "examples/models/tiny-llama"


def student_of(source: Any, scheme: str, target: str, calibration: Calibration | None, **options: Any) -> Student:
    """A student in memory as a distillation makes it."""
    from bridge.workflows.distill.run import own_model

    model, structure = own_model(source), structure_of(source)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    origins, tied = live_names(model, source.specs), tied_names(model)
    model.float()
    for param in model.parameters():
        param.requires_grad_(True)
    plan = bridge.plan(source, target, scheme, **options)
    hooks = FakeInputs(model, input_codes(plan, calibration, structure, origins, tied))
    params = dict(model.named_parameters(remove_duplicate=False))
    return Student(model, dtypes, Codes(plan, calibration, params, origins, source.specs, hooks))


def calibrated(source: Any, scheme: str) -> Calibration:
    ids = torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(1))
    return bridge.calibrate(source, scheme, [{"input_ids": ids}], progress=False)


CELLS = [
    ("LlamaForCausalLM", "float32", "int8_wo"),
    ("LlamaForCausalLM", "bfloat16", "fp8"),
    ("GPT2LMHeadModel", "float32", "int8_wo"),
    ("GPT2LMHeadModel", "bfloat16", "fp8"),
    ("Phi3ForCausalLM", "bfloat16", "int8_wo"),
    ("Phi3ForCausalLM", "float32", "fp8"),
    ("Gemma2ForCausalLM", "bfloat16", "fp8_pc_pt"),
    ("MixtralForCausalLM", "bfloat16", "int8_wo"),
    ("Qwen2ForCausalLM", "float32", "int8_sq"),
    ("DeepseekV3ForCausalLM", "bfloat16", "int8_wo"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "scheme"), CELLS)
def test_what_runs_is_what_is_written(family: str, dtype: str, scheme: str, tmp_path: Path) -> None:
    """Every tensor of the file, dequantized, has the bits of the parameters that the student runs with."""
    source = open_source(build(family, getattr(torch, dtype)))
    calibration = None if scheme == "int8_wo" else calibrated(source, scheme)
    student = student_of(source, scheme, "hf", calibration)
    with torch.no_grad():  # as after some steps: not the weights that were calibrated
        for master in student.masters.values():
            master.mul_(1.01)
    student.settle()
    live = {name: param.detach().clone() for name, param in student.model.named_parameters(remove_duplicate=False)}
    origins = live_names(student.model, source.specs)
    trained = student.written()
    bridge.convert(trained, "hf", scheme, tmp_path / "coded", calib=calibration, verify=False, progress=False)
    bridge.convert(tmp_path / "coded", "hf", "none", tmp_path / "plain", verify=False, progress=False)
    plain, smoothed = open_source(tmp_path / "plain"), scheme == "int8_sq"
    compared = 0
    for name, spec in plain.specs.items():
        written = torch.from_numpy(plain.read(name).copy())
        values = written.view(getattr(torch, spec.dtype)).float()
        parts = [part.of(live[part.live]) for part in origins[name].parts if part.live in live]
        if not parts:
            continue
        runs = parts[0] if len(parts) == 1 else torch.cat(parts, origins[name].axis)
        if smoothed:  # folded pre-scales change norms with their weights
            continue
        # files in 16 bits hold what codes decode to, rounded once more
        assert torch.equal(values.reshape(runs.shape), runs.to(getattr(torch, spec.dtype)).float()), name
        compared += 1
    assert smoothed or compared > 10
    if smoothed:
        assert_same_function(student, trained, plain, live)


def assert_same_function(student: Student, trained: Any, plain: Any, live: Any) -> None:
    """With pre-scales in norms, matrices differ and their products do not."""
    ids = torch.randint(3, 90, (1, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name, param in trained.named_parameters(remove_duplicate=False):
            param.data = live[name]
        own = trained.float()(input_ids=ids).logits
        theirs = plain.load_model().float()(input_ids=ids).logits
    assert torch.allclose(own, theirs, rtol=1e-3, atol=1e-3 * float(own.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "logits", "gradients"),
    [("int4_wo", 1e-6, 1e-3), ("int8_wo", 1e-6, 1e-3), ("int8", 1e-5, 1e-3), ("fp8", 1e-5, 2e-3)],
)
def test_gradients_are_those_of_modelopt(scheme: str, logits: float, gradients: float) -> None:
    """On the same weights: relative L2 of logits and of each gradient; the fake model adds in another order."""
    pytest.importorskip("modelopt.torch.quantization")
    from bridge.api.verbs import fake_quantize
    from bridge.quant.schemes.load import load_scheme

    source = open_source(LLAMA)
    bound = load_scheme(scheme).bound(structure_of(source).sites)
    fake = fake_quantize(source, bound, samples=8, sequence=64)
    calibration = fake.calibration
    plan = bridge.plan(source, "hf", scheme)
    options = {"own_scales": True} if scheme == "fp8" else {}  # q, k and v share theirs elsewhere
    target = "trt" if scheme == "int8" else "hf"  # hf gives q, k and v one pre-scale
    student = student_of(source, scheme, target, calibration if plan.calibration else None, **options)
    for module in fake.model.modules():
        if hasattr(module, "_pass_through_bwd"):  # ModelOpt's default lets gradients beyond amax pass
            module._pass_through_bwd = False
    student.settle()
    models = [student.model, fake.model]
    for param in (param for model in models for param in model.parameters()):
        param.requires_grad_(True)
    labels = torch.randn(1, 8, 1536, generator=torch.Generator().manual_seed(3))
    for seed in range(2, 12):  # an input halfway between two codes may get either, by the processor: then the next text
        ids = torch.randint(3, 1500, (1, 8), generator=torch.Generator().manual_seed(seed))
        own, theirs = (model(input_ids=ids).logits for model in models)
        if relative(own, theirs) < logits:
            break
    assert relative(own, theirs) < logits
    for out in (own, theirs):
        (out * labels).mean().backward()
    ours, expected = ({name: param.grad for name, param in model.named_parameters()} for model in models)
    for name, gradient in ours.items():
        inputs = getattr(fake.model.get_submodule(name.rpartition(".")[0]), "input_quantizer", None)
        scale = getattr(inputs, "pre_quant_scale", None)  # its matrix has been divided by it, ours has not
        assert relative(gradient, expected[name] if scale is None else expected[name] / scale) < gradients, name


def relative(one: Any, other: Any) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.slow
def test_inputs_beyond_a_static_amax_have_no_gradient() -> None:
    source = open_source(LLAMA)
    plan, structure = bridge.plan(source, "hf", "fp8"), structure_of(source)
    model = source.load_model()
    origins = live_names(model, source.specs)
    calibration = bridge.calibrate(source, "fp8", samples=2, sequence=32, progress=False)
    codes = input_codes(plan, calibration, structure, origins, tied_names(model))
    own = codes["model.layers.0.mlp.down_proj"]
    hooks = FakeInputs(model, {"model.layers.0.mlp.down_proj": own})
    x = torch.zeros(1, 384)
    x[0, 0], x[0, 1] = own.amax * 0.5, own.amax * 2
    x.requires_grad_(True)
    seen: list[Any] = []
    down = model.model.layers[0].mlp.down_proj
    handle = down.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    down(x)
    seen[0].sum().backward()
    assert x.grad is not None and x.grad[0, 0] == 1 and x.grad[0, 1] == 0
    assert float(seen[0].detach()[0, 1]) == pytest.approx(own.amax, rel=1e-3)
    hooks.remove()
    handle.remove()


def test_inputs_with_other_factors_are_not_quantized_alike() -> None:
    (numeric,) = bridge.plan(LLAMA, "hf", "int8_sq").quantized[0].format.weight  # type: ignore[union-attr]
    one = InputCodes(numeric, 1.0, np.ones(4, np.float32))
    assert one.same_as(InputCodes(numeric, 1.0, np.ones(4, np.float32)))
    assert not one.same_as(InputCodes(numeric, 1.0, np.array([1, 1, 1, 2], np.float32)))
    assert not one.same_as(InputCodes(numeric, 2.0, np.ones(4, np.float32)))


@pytest.mark.parametrize(
    ("scheme", "said"),
    [("int4_gptq", "calibration chooses its codes"), ("q4_0_imatrix", "calibration chooses its codes")],
)
def test_codes_that_calibration_chooses_are_refused(scheme: str, said: str, tmp_path: Path) -> None:
    target = "gguf" if scheme.startswith("q4") else "hf"
    with pytest.raises(SchemeError, match=said):
        bridge.distill(LLAMA, LLAMA, out=tmp_path / "out", target=target, quant=scheme, steps=1, batch=1, sequence=32)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["hf", "trtllm", "ort", "trt", "gguf", "tripy"])
def test_a_student_runs_with_nearly_its_own_weights_for_each_target(target: str) -> None:
    """Eight bits: a matrix that took another's place would change the answers."""
    source = open_source(LLAMA)
    student = student_of(source, "q8_0" if target == "gguf" else "int8_wo", target, None)
    student.settle()
    ids = torch.randint(3, 1500, (2, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        own, whole = student.model(input_ids=ids).logits, source.load_model()(input_ids=ids).logits
    assert relative(own, whole) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trtllm", "ort"])
def test_places_of_a_matrix_are_those_of_its_source(target: str) -> None:
    from bridge.verification.simulated.decoded import _value_positions

    source = open_source(LLAMA)
    plan = bridge.plan(source, target, "int8_wo")
    for step in plan.quantized:
        for name, rows, places in _value_positions(step, source.specs):
            assert places.size == source.specs[name].size or rows.start is not None
            assert np.unique(places).size == places.size
    assert Buffers().memory == {}
