"""Engine building against a stand-in for `tensorrt` that records calls; no test here ran TensorRT."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from bridge.core.errors import UsageError, WriteError
from bridge.targets.trt import products as module
from bridge.targets.trt.build import build_engine
from bridge.targets.trt.products import EngineUnavailable, why_unavailable
from bridge.targets.trt.profile import Profile, load_graph, parse_ranges, profile_shapes, profiles_of, trtexec_line

PLAN = b"an engine"
PAST = {
    f"past_key_values.{layer}.{side}": ("batch", 2, "past_sequence", 48)
    for layer in range(2)
    for side in ("key", "value")
}
INPUTS: dict[str, tuple[int | str | None, ...]] = {
    "input_ids": ("batch", "sequence"), "attention_mask": ("batch", "total_sequence"), **PAST, "fixed": (3, 5),
}  # fmt: skip


def write_onnx(folder: Path, inputs: dict[str, tuple[int | str | None, ...]] = INPUTS) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, next(iter(inputs.values())))
    graph = helper.make_graph([helper.make_node("Identity", [next(iter(inputs))], ["y"])], "g", values, [output])
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


@dataclass
class ParserError:
    name: str
    text: str

    def node(self) -> int:
        return 7

    def node_name(self) -> str:
        return self.name

    def node_operator(self) -> str:
        return "QuantizeLinear"

    def desc(self) -> str:
        return self.text


@dataclass
class Recorder:
    """What the stand-in was asked to do, and how it should answer."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    errors: list[ParserError] = field(default_factory=list)
    plan: bytes | None = PLAN

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def stand_in(record: Recorder, version: str = "10.15.1") -> Any:
    class ILogger:
        ERROR, INTERNAL_ERROR = "error", "internal error"

    class IProgressMonitor:
        pass

    class Config:
        progress_monitor: Any = None

        def __getattr__(self, name: str) -> Any:
            return lambda *given: record.calls.append((name, *given)) or 0

    class Builder:
        def __init__(self, log: Any) -> None:
            assert isinstance(log, ILogger)

        def create_network(self, flags: int) -> str:
            record.calls.append(("create_network", flags))
            return "network"

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Any:
            return SimpleNamespace(set_shape=lambda *given: record.calls.append(("set_shape", *given)))

        def build_serialized_network(self, network: str, config: Config) -> bytes | None:
            monitor = config.progress_monitor
            monitor.phase_start("Building", None, 2)
            monitor.phase_start("Tactics", "Building", 5)
            going = monitor.step_complete("Tactics", 0) and monitor.step_complete("Building", 0)
            monitor.phase_finish("Tactics")
            going = going and monitor.step_complete("Building", 1)
            record.calls.append(("built", going))
            return record.plan if going else None

    class OnnxParser:
        num_errors = len(record.errors)

        def __init__(self, network: str, log: Any) -> None:
            pass

        def parse_from_file(self, path: str) -> bool:
            record.calls.append(("parse_from_file", path))
            return not record.errors

        def get_error(self, at: int) -> ParserError:
            return record.errors[at]

    return SimpleNamespace(
        __version__=version, ILogger=ILogger, IProgressMonitor=IProgressMonitor, Builder=Builder, OnnxParser=OnnxParser,
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=3),
    )  # fmt: skip


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in(found))
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    return found


def build(path: Path, **settings: Any) -> None:
    build_engine(path, path.with_name("m.engine"), [Profile()], **settings)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "model.onnx")


def test_profiles_cover_every_dynamic_input_and_no_other(tmp_path: Path) -> None:
    shapes = profile_shapes(
        write_onnx(tmp_path), Profile(batch=(1, 2, 4), sequence=(1, 9, 30), past_sequence=(0, 11, 70))
    )
    assert shapes["input_ids"] == ((1, 1), (2, 9), (4, 30))
    assert shapes["attention_mask"] == ((1, 1), (2, 20), (4, 100))
    assert shapes["past_key_values.1.value"] == ((1, 2, 0, 48), (2, 2, 11, 48), (4, 2, 70, 48))
    assert set(shapes) == {"input_ids", "attention_mask", *PAST}


def test_an_axis_without_a_range_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = write_onnx(tmp_path, {"pixels": ("batch", 3, "height", None)})
    with pytest.raises(UsageError, match=r"pixels: axis height, pixels: axis \(no name\).*Profile\(others="):
        profile_shapes(path, Profile())


def test_a_range_for_an_axis_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no graph has a dynamic axis 'sequense'; known: .*nearest: sequence"):
        profile_shapes(write_onnx(tmp_path), Profile(others={"sequense": (1, 2, 3)}))


@pytest.mark.parametrize("bad", [(2, 1, 3), (1, 5, 4), (-1, 1, 1)])
def test_a_range_that_does_not_rise_is_refused(bad: tuple[int, int, int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"min <= opt <= max.*batch"):
        profile_shapes(write_onnx(tmp_path), Profile(batch=bad))


def test_the_command_says_the_whole_build(tmp_path: Path) -> None:
    path = write_onnx(tmp_path, {"input_ids": ("batch", "sequence"), "fixed": (3, 5)})
    assert trtexec_line(path, Profile(batch=(1, 2, 4), sequence=(1, 9, 30)), "m.engine") == (
        "trtexec --onnx=model.onnx --saveEngine=m.engine --stronglyTyped --minShapes=input_ids:1x1 "
        "--optShapes=input_ids:2x9 --maxShapes=input_ids:4x30"
    )


def test_a_static_model_needs_no_profile(record: Recorder, tmp_path: Path) -> None:
    path = write_onnx(tmp_path, {"x": (3, 5)})
    assert "Shapes" not in trtexec_line(path, Profile())
    build(path)
    assert not record.named("set_shape") and not record.named("add_optimization_profile")


def test_a_build_makes_the_documented_calls(record: Recorder, tmp_path: Path) -> None:
    path = write_onnx(tmp_path)
    build(path)
    assert (tmp_path / "m.engine").read_bytes() == PLAN
    assert record.named("create_network") == [(1 << 3,)]
    assert record.named("parse_from_file") == [(str(path),)]
    assert {(name, *sides) for name, *sides in record.named("set_shape")} == {
        (name, *sides) for name, sides in profile_shapes(path, Profile()).items()
    }
    assert len(record.named("add_optimization_profile")) == 1
    assert leftovers(tmp_path) == ["m.engine"]


def test_version_11_is_not_asked_for_a_strongly_typed_network(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in(record, "11.1.0"))
    build(write_onnx(tmp_path))
    assert record.named("create_network") == [(0,)]


def test_the_parsers_errors_are_listed_with_node_names(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.errors = [ParserError(f"layers.{i}.q", "axis is wrong") for i in range(3)] + [ParserError("", "no type")]
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in(record))
    with pytest.raises(WriteError, match="parser refuses it") as raised:
        build(write_onnx(tmp_path))
    assert "layers.{0..2}.q: QuantizeLinear: axis is wrong" in str(raised.value)
    assert "node 7: QuantizeLinear: no type" in str(raised.value)
    assert leftovers(tmp_path) == []


def test_a_failed_build_says_the_command_and_leaves_nothing(record: Recorder, tmp_path: Path) -> None:
    record.plan = None
    with pytest.raises(WriteError, match=r"built no engine: it logged why\n.*trtexec"):
        build(write_onnx(tmp_path))
    assert leftovers(tmp_path) == []


def test_progress_counts_the_steps_of_the_outermost_phase(record: Recorder, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    build(write_onnx(tmp_path), progress=lambda *given: told.append(given))
    assert told == [(1, 2, "Building"), (2, 2, "Building")]


def test_an_interrupt_cancels_the_build_and_is_raised_outside_of_it(record: Recorder, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(write_onnx(tmp_path), progress=interrupt)
    assert record.named("built") == [(False,)]
    assert leftovers(tmp_path) == []


def test_a_full_disk_leaves_no_half_engine(record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    path = write_onnx(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space left on device"):
        build(path)
    assert leftovers(tmp_path) == []


def test_a_missing_package_is_said_with_the_install_command_and_the_build_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineUnavailable, match=r"(?s)`tensorrt` cannot be imported.*pip install.*trtexec --onnx="):
        build(write_onnx(tmp_path))
    assert leftovers(tmp_path) == []


def test_a_missing_gpu_a_placeholder_and_an_old_version_are_each_said(
    record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unavailable() == ""
    monkeypatch.setattr(module, "gpu_count", lambda: 0)
    assert "CUDA finds no NVIDIA GPU" in why_unavailable()
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in(record, "8.6.1"))
    assert "8.6.1 is too old" in why_unavailable()
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace())
    assert "placeholder" in why_unavailable()


def test_counting_gpus_without_a_driver_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", absent)
    assert module.gpu_count() == 0


def test_images_of_any_size_reach_the_largest_of_mistral_3() -> None:
    for axis in ("image_height", "image_width"):
        extents = Profile().ranges[axis]
        assert extents[2] >= 1540  # `longest_edge` of its processor
        assert all(extent % 28 == extent % 32 == 0 for extent in extents), "patches of 14 or 16, two by two"
    least_rows = (1540 // 28) ** 2
    assert Profile().ranges["image_rows"][2] >= least_rows


def test_given_ranges_share_the_positions_with_the_others(tmp_path: Path) -> None:
    """The longest text is one token behind a full past; a prompt has the positions that its past leaves."""
    config, graph = {"max_position_embeddings": 4096}, load_graph(write_onnx(tmp_path))

    def ranges(text: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(one.sequence, one.past_sequence) for one in profiles_of(config, graph, parse_ranges(text))]

    assert ranges("sequence=1:128:4096") == [((1, 128, 4096), (0, 1, 1)), ((1, 1, 1), (0, 128, 1024))]
    assert ranges("past_sequence=0:512:4095") == [((1, 128, 512), (0, 512, 3584)), ((1, 1, 1), (0, 512, 4095))]
    assert ranges("sequence=1:1:1") == [((1, 1, 1), (0, 128, 1024))]
    with pytest.raises(UsageError, match="profile past_sequence: 4097 tokens are more than the 4096 positions"):
        ranges("past_sequence=0:512:4096")


def test_a_decoder_has_a_profile_for_prompts_and_one_for_single_tokens(tmp_path: Path) -> None:
    prompt, step = profiles_of({"max_position_embeddings": 96}, load_graph(write_onnx(tmp_path)))
    assert (prompt.sequence, prompt.past_sequence) == ((1, 48, 48), (0, 48, 48))
    assert (step.sequence, step.past_sequence, step.batch) == ((1, 1, 1), prompt.past_sequence, prompt.batch)


def test_a_decoder_with_buffers_has_prompts_of_at_most_a_buffer(tmp_path: Path) -> None:
    inputs = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", 40), "write_indices": ("batch",)}
    path = write_onnx(tmp_path, inputs | {"past_key_values.0.key": ("batch", 2, 40, 8)})
    prompt, step = profiles_of({"max_position_embeddings": 4096}, load_graph(path))
    assert (prompt.sequence, step.sequence) == ((1, 40, 40), (1, 1, 1))
    assert "write_indices:8" in trtexec_line(path, prompt) and "past_key_values.0.key:8x2x40x8" in trtexec_line(
        path, prompt
    )
    with pytest.raises(UsageError, match="profile sequence: 41 tokens are more than the 40 of the graph's buffers"):
        profiles_of({}, load_graph(path), parse_ranges("sequence=1:8:41"))


def test_a_graph_without_a_cache_has_one_profile_and_one_that_scans_a_short_one(tmp_path: Path) -> None:
    path = write_onnx(tmp_path, {"input_ids": ("batch", "sequence")})
    assert [profile.sequence for profile in profiles_of({}, load_graph(path))] == [(1, 128, 512)]
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("Scan", ["x"], ["z"]))
    path.write_bytes(model.SerializeToString())
    assert [(profile.sequence, profile.batch) for profile in profiles_of({}, load_graph(path))] == [
        ((1, 128, 128), (1, 1, 1))
    ]
