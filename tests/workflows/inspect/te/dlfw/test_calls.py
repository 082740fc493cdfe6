"""The functions of nvdlfw-inspect, as Transformer Engine's modules call them: routing, tensors, logs, steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from bridge import dlfw as debug_api  # noqa: E402
from bridge.core.errors import BridgeWarning, InspectError, UsageError, WriteError  # noqa: E402
from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import of_format, of_recipe  # noqa: E402

GEMMS = {
    "activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "output": ("fprop",), "dgrad": ("dgrad",),
    "wgrad": ("wgrad",), "gradient": ("dgrad", "wgrad"),
}  # fmt: skip
STATS = {"enabled": True, "tensors": ["activation"], "stats": ["max", "mean"]}
LAYER = "model.0.fc1"


class Float8CurrentScalingQuantizer:
    """By its name: that of Transformer Engine, with its dtype."""

    def __init__(self, dtype: str = "kFloat8E5M2") -> None:
        self.dtype = SimpleNamespace(name=dtype)


class MXFP8Quantizer:
    """By its name."""


class Float8Quantizer:
    """By its name, with its scale."""

    def __init__(self, amax: float) -> None:
        self.scale = torch.tensor([448 / amax])


def section(layers: Any = None, **features: Any) -> dict[str, Any]:
    return {"enabled": True, "layers": layers or {"layer_types": ["fc1"]}, "transformer_engine": features}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    def begin(config: Any, **options: Any) -> Any:
        debug_api.initialize(config, log_dir=tmp_path, **options)
        return debug_api.transformer_engine

    yield begin
    debug_api.end_debug()


def inspected(te: Any, name: str, x: Any, step: int = 0, quantizer: Any = None) -> None:
    te.inspect_tensor(
        layer_name=LAYER, tensor_name=name, tensor=x, rowwise_quantized_tensor=x, columnwise_quantized_tensor=x,
        quantizer=quantizer, iteration=step, tp_group=None, tp_size=1,
    )  # fmt: skip


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """The log as a parser of upstream's reads it."""
    (path,) = (folder / "nvdlfw_inspect_statistics_logs").iterdir()
    assert path.name == "nvdlfw_inspect_globalrank-0.log"
    found = {}
    for line in path.read_text().splitlines():
        name, step, value = (part.strip() for part in line.split(" - INFO - ")[1].split("\t\t\t\t"))
        found[name, int(step.removeprefix("iteration="))] = float(value.removeprefix("value="))
    return found


def test_routing_calls_of_a_layer_without_features_are_the_defaults(start: Any) -> None:
    te = start({"s": section(LogTensorStats=STATS)})
    for layer in ("model.0.fc2", LAYER):
        for tensor, gemms in GEMMS.items():
            due = layer == LAYER and tensor == "activation"
            words = {"layer_name": layer, "tensor_name": tensor, "iteration": 3}
            assert te.inspect_tensor_enabled(**words) == ((True, 4) if due else (False, None))
            for gemm in gemms:
                assert te.inspect_tensor_postquantize_enabled(gemm=gemm, **words) == (False, None)
                assert te.modify_tensor_enabled(gemm=gemm, **words) == (False, None)
                assert te.fp8_gemm_enabled(layer_name=layer, gemm=gemm, iteration=3) == (True, None)
    with pytest.raises(NotImplementedError, match="no feature of the config does it"):
        te.modify_tensor(layer_name=LAYER, gemm="fprop", tensor_name="weight", tensor=torch.ones(2), iteration=0)


def test_the_next_step_is_the_least_of_all_features(start: Any) -> None:
    te = start({
        "a": section(LogTensorStats={**STATS, "freq": 4}),
        "b": section(LogQuantizedTensorStats={**STATS, "stats": ["int8_mse"], "start_step": 6, "end_step": 7}),
    })  # fmt: skip
    asked = [te.inspect_tensor_enabled(layer_name=LAYER, tensor_name="activation", iteration=n) for n in range(9)]
    assert asked == [
        (True, 4), (False, 4), (False, 4), (False, 4), (True, 6), (False, 6), (True, 7), (True, 8), (True, 12)
    ]  # fmt: skip


@pytest.mark.parametrize("chosen", [["fprop"], ["dgrad", "wgrad"]])
def test_disabled_gemms(start: Any, chosen: list[str]) -> None:
    te = start({"s": section(DisableFP8GEMM={"enabled": True, "gemms": chosen})})
    for gemm in ("fprop", "dgrad", "wgrad"):
        told = te.fp8_gemm_enabled(layer_name=LAYER, gemm=gemm, iteration=5)
        assert told == ((False, 6) if gemm in chosen else (True, None))


def test_a_disabled_layer_and_another_feature_that_has_no_objection(start: Any) -> None:
    te = start({"s": section(DisableQuantizationLayer={"enabled": True, "freq": 2}, LogTensorStats=STATS)})
    assert [te.fp8_gemm_enabled(layer_name=LAYER, gemm="dgrad", iteration=n) for n in (0, 1)] == [(False, 2), (True, 2)]


@pytest.mark.parametrize("name", ["FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fake_quantization_turns_its_gemm_off_and_makes_the_values(start: Any, name: str, dtype: str) -> None:
    words = {"enabled": True, "gemms": ["fprop"], "tensors": ["activation", "weight"], "quant_format": name}
    te = start({"s": section(FakeQuant=words)})
    assert te.fp8_gemm_enabled(layer_name=LAYER, gemm="fprop", iteration=0) == (False, 1)
    assert te.fp8_gemm_enabled(layer_name=LAYER, gemm="wgrad", iteration=0) == (True, None)
    given = {"layer_name": LAYER, "gemm": "fprop", "tensor_name": "weight"}
    assert te.modify_tensor_enabled(**given, iteration=0) == (True, 1)
    assert te.modify_tensor_enabled(layer_name=LAYER, gemm="dgrad", tensor_name="weight", iteration=0) == (False, None)
    x = torch.randn(4, 64, dtype=getattr(torch, dtype), generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(fake_quantized(x.float().numpy(), "float32", of_format(name))).to(x.dtype)
    made = te.modify_tensor(**given, tensor=x, default_quantizer=None, iteration=0, dtype=torch.float32)
    assert made.dtype == torch.float32 and torch.equal(made.to(x.dtype), expected) and not torch.equal(made, x)
    out = torch.zeros_like(x)
    assert te.modify_tensor(**given, tensor=x, default_quantizer=None, iteration=0, out=out) is None
    assert torch.equal(out, expected)


def test_statistics_of_a_step_are_logged_when_it_ends(start: Any, tmp_path: Path) -> None:
    stats = {"enabled": True, "tensors": ["activation", "weight"], "stats": ["max", "numel"]}
    te = start({"s": section(LogTensorStats=stats)}, init_training_step=7)
    parts = [torch.tensor([[1.0, 1e-6]]), torch.tensor([[0.25, 3.0]])]
    for part in parts:
        inspected(te, "activation", part, 7)
        inspected(te, "weight", part, 7)
    assert not logged(tmp_path)
    debug_api.step()
    debug_api.step()
    assert logged(tmp_path) == {
        (f"{LAYER}_activation_max", 7): 3.0, (f"{LAYER}_activation_numel", 7): 4.0,  # both microbatches
        (f"{LAYER}_weight_max", 7): 1.0, (f"{LAYER}_weight_numel", 7): 2.0,  # once a step
    }  # fmt: skip


@pytest.mark.parametrize(
    ("quantizer", "recipe"),
    [(Float8CurrentScalingQuantizer(), "fp8_current_scaling"), (MXFP8Quantizer(), "mxfp8"), (None, "")],
)
def test_a_statistic_without_a_scheme_is_that_of_the_quantizer(
    start: Any, tmp_path: Path, quantizer: Any, recipe: str
) -> None:
    words = {"enabled": True, "tensors": ["gradient"], "stats": ["mse", "nvfp4_mse"]}
    te = start({"s": section(LogFp8TensorStats=words)})
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    inspected(te, "gradient", x, quantizer=quantizer)
    debug_api.step()
    told = logged(tmp_path)
    assert (f"{LAYER}_gradient_nvfp4_mse", 0) in told
    if recipe:
        v = torch.from_numpy(fake_quantized(x.numpy(), "float32", of_recipe(recipe, "gradient")))
        assert told[f"{LAYER}_gradient_mse", 0] == pytest.approx(float((v - x).square().mean()), rel=1e-5)
    else:
        assert (f"{LAYER}_gradient_mse", 0) not in told
        assert (
            "leaves gradient as it is"
            in (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
        )


@pytest.mark.parametrize(("dtype", "like"), [("kFloat8E4M3", "activation"), ("kFloat8E5M2", "gradient")])
def test_the_quantizer_says_which_float8_it_writes(start: Any, tmp_path: Path, dtype: str, like: str) -> None:
    """A recipe with Format.E4M3 has gradients in E4M3."""
    te = start({"s": section(LogFp8TensorStats={"enabled": True, "tensors": ["gradient"], "stats": ["mse"]})})
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    inspected(te, "gradient", x, quantizer=Float8CurrentScalingQuantizer(dtype))
    debug_api.step()
    v = torch.from_numpy(fake_quantized(x.numpy(), "float32", of_recipe("fp8_current_scaling", like)))
    assert logged(tmp_path)[f"{LAYER}_gradient_mse", 0] == pytest.approx(float((v - x).square().mean()), rel=1e-5)


def test_overflows_of_delayed_scaling_are_those_of_its_scale(start: Any, tmp_path: Path) -> None:
    words = {"enabled": True, "tensors": ["activation"], "stats": ["fp8_delayed_scaling_overflows%"]}
    te = start({"s": section(LogFp8TensorStats=words)})
    inspected(te, "activation", torch.tensor([[0.5, 1.0, 4.0, -8.0]]), quantizer=Float8Quantizer(2.0))
    debug_api.step()
    assert logged(tmp_path) == {(f"{LAYER}_activation_fp8_delayed_scaling_overflows%", 0): 50.0}


def test_loggers_are_the_callers_or_a_tensorboard_writer(start: Any, tmp_path: Path) -> None:
    told: list[Any] = []

    class Mine:
        def log_scalar(self, *words: Any, **_: Any) -> None:
            told.append(words)

        add_scalar = log_scalar

    for options in ({"statistics_logger": Mine()}, {"tb_writer": Mine()}):
        te = start({"s": section(LogTensorStats={**STATS, "stats": ["max"]})}, **options)
        inspected(te, "activation", torch.tensor([[2.0, math.inf]]))
        debug_api.step()
        debug_api.end_debug()
    assert told == [(f"{LAYER}_activation_max", 2.0, 0)] * 2
    assert not (tmp_path / "nvdlfw_inspect_statistics_logs").exists()


def test_dumps_and_a_weight_in_fp8(start: Any, tmp_path: Path) -> None:
    class Fp8:
        def dequantize(self) -> Any:
            return torch.full((2, 2), 3.0)

    words = {"enabled": True, "tensors": ["weight"], "high_precision_tensor": True, "quantized_tensor": True}
    te = start({"s": section(DumpTensors=words)})
    te.inspect_tensor(layer_name=LAYER, tensor_name="weight", tensor=None, rowwise_quantized_tensor=Fp8(), iteration=0,
                      columnwise_quantized_tensor=None, quantizer=MXFP8Quantizer(), tp_group=None)  # fmt: skip
    debug_api.step()
    tensors = load_file(tmp_path / "dumps" / "rank_0" / "step_000000.safetensors")
    assert {name.rpartition(".")[2] for name in tensors} == {"high_precision", "quantized", "codes", "scales"}
    assert torch.equal(tensors[f"{LAYER}_weight.high_precision"], torch.full((2, 2), 3.0))


def test_dumps_stand_beside_what_is_there_and_replace_nothing(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "dumps" / "rank_0"
    folder.mkdir(parents=True)
    for name in ("mine.txt", ".mine", "step_000000.safetensors"):
        (folder / name).write_text("mine")
    words = {"s": section(DumpTensors={"enabled": True, "tensors": ["weight"], "high_precision_tensor": True})}
    with pytest.raises(WriteError, match=r"step_000000\.safetensors: is of another run, .* move it away"):
        start(words)
    te = start(words, init_training_step=1)  # a run that goes on
    inspected(te, "weight", torch.ones(2, 2), 1)
    debug_api.step()
    assert len(load_file(folder / "step_000001.safetensors")) == 1
    inspected(te, "weight", torch.ones(2, 2), 0)
    debug_api.initialize_training_step(0)
    with pytest.raises(WriteError, match="is of another run"):
        debug_api.step()
    debug_api.end_debug()
    names = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert names.pop("step_000001.safetensors")
    assert names == dict.fromkeys(("mine.txt", ".mine", "step_000000.safetensors"), b"mine")


def test_explicit_calls_of_the_generic_feature(start: Any, tmp_path: Path) -> None:
    generic = {"enabled": True, "tensors": ["loss"], "stats": ["MIN", "max"], "freq": 2}
    start({"s": {"enabled": True, "layers": {"layer_types": ["fc1"]}, "LogTensorStats": generic}})
    x = torch.tensor([1.0, 2.0])
    assert debug_api.log_tensor_stats(LAYER, tensor=x, tensor_name="loss") == {"min": 1.0, "max": 2.0}
    assert debug_api.log_tensor_stats(LAYER, tensor=x, tensor_name="loss", iteration=1) == {}
    assert logged(tmp_path)[f"{LAYER}_loss_min", 0] == 1.0


def test_messages_are_written_once(start: Any, tmp_path: Path) -> None:
    start({"s": section(LogTensorStats=STATS)})
    for _ in range(2):
        debug_api.log_message("made", layer_name=LAYER)
    (line,) = (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text().splitlines()
    assert line.endswith(f" - INFO - LAYER={LAYER}: made")


def test_a_run_that_goes_on_adds_to_the_logs(start: Any, tmp_path: Path) -> None:
    for step in range(2):
        te = start({"s": section(LogTensorStats={**STATS, "stats": ["max"]})}, init_training_step=step)
        inspected(te, "activation", torch.ones(1, 2) + step, step)
        debug_api.step()
        debug_api.end_debug()
    assert logged(tmp_path) == {(f"{LAYER}_activation_max", step): 1.0 + step for step in range(2)}


def test_it_is_initialized_once_and_forgotten_at_the_end(tmp_path: Path) -> None:
    config = {"s": section(LogTensorStats=STATS)}
    assert debug_api.DEBUG_MANAGER is None
    debug_api.step()  # without effect, as upstream
    with pytest.raises(RuntimeError, match="call initialize first"):
        debug_api.transformer_engine  # noqa: B018
    debug_api.initialize(config, log_dir=tmp_path)
    with pytest.raises(ValueError, match="initialized already"):
        debug_api.initialize(config, log_dir=tmp_path)
    debug_api.initialize_training_step(4)
    assert debug_api.DEBUG_MANAGER._trainer_iteration_count == 4
    debug_api.step()
    assert debug_api.DEBUG_MANAGER._trainer_iteration_count == 5
    group = object()
    debug_api.set_tensor_reduction_group(group)
    assert debug_api.get_tensor_reduction_group() is group
    with pytest.warns(BridgeWarning, match="no layer called that 's' is about"):
        debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None


def test_without_a_config_nothing_is_due(start: Any) -> None:
    te, words = start(""), {"layer_name": LAYER, "iteration": 0}  # the default of `initialize`
    assert te.fp8_gemm_enabled(**words, gemm="fprop") == (True, None)
    assert te.modify_tensor_enabled(**words, gemm="fprop", tensor_name="activation") == (False, None)
    assert te.inspect_tensor_enabled(**words, tensor_name="activation") == (False, None)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ("none.yaml", UsageError, "no such file"),
        ({"s": section({"roles": ["mlp.down"]}, LogTensorStats=STATS)}, InspectError, "roles need a model"),
        ({"s": section({"layer_numbers": [-1]}, LogTensorStats=STATS)}, InspectError, "from the end need a model"),
        ({"s": section(LogTensorStats={**STATS, "stats": ["maxx"]})}, InspectError, "statistic 'maxx' is unknown"),
    ],
)
def test_mistakes_are_errors_of_initialize(config: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        debug_api.initialize(config, log_dir=tmp_path)
    assert debug_api.DEBUG_MANAGER is None
    with pytest.raises(UsageError, match=r"initialize\(tb=\): unknown"):
        debug_api.initialize({"s": section(LogTensorStats=STATS)}, log_dir=tmp_path, tb=1)


def test_two_sections_that_change_the_same_tensor_are_told_at_the_layers_first_call(start: Any) -> None:
    fake = {"enabled": True, "gemms": ["fprop"], "tensors": ["weight"], "quant_format": "FP8E4M3"}
    te = start({"a": section(FakeQuant=fake), "b": section({"modules": ["*.0.*"]}, FakeQuant=fake)})
    te.fp8_gemm_enabled(layer_name="model.1.fc1", gemm="fprop", iteration=0)
    with pytest.raises(InspectError, match=r"both change weight of fprop of model\.0\.fc1"):
        te.fp8_gemm_enabled(layer_name=LAYER, gemm="fprop", iteration=0)


def test_features_are_listed_and_explained(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    start({"s": section(LogTensorStats=STATS)}, feature_dirs="site/transformer_engine/debug/features")
    debug_api.list_features()
    assert "transformer_engine.FakeQuant" in capsys.readouterr().out
    debug_api.explain_features("transformer_engine.FakeQuant")
    assert capsys.readouterr().out == "transformer_engine.FakeQuant: gemms, tensors, quant_format, scheme\n"
    debug_api.explain_features(["Fake"])
    assert "is not known" in capsys.readouterr().out


def test_names_of_layers_are_those_of_upstream() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2))
    block.layer_number = 5
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
    debug_api.infer_and_assign_layer_names(model)
    assert (model.name, block.name, block[0].name) == ("model", "model.layers.5", "model.layers.5.0")
