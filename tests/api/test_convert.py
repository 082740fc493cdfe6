"""The main job: convert, prove, refuse, fail cleanly, continue after a kill; and a real pretrained model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import (
    BridgeError,
    BridgeWarning,
    CalibrationError,
    ExportError,
    SourceError,
    UsageError,
    VerifyError,
    WriteError,
)
from bridge.core.formats.safetensors import read_header
from bridge.quant.calibration import Calibration
from bridge.targets.onnx.run.runtime import Runtime
from tests.models.sources_made import made_llama
from tests.models.sparse_checkpoint import LLAMA_405B, llama_specs, write_sparse

MODELS = Path(__file__).parents[2] / "examples" / "models"
LLAMA = MODELS / "tiny-llama"
pytestmark = pytest.mark.usefixtures("graphs_once")
# What a conversion writes whose bytes are a promise; reports hold seconds and memory.
STABLE = (
    "model.onnx", "model.safetensors", "bridge.json", "bridge/calibration.safetensors", "config.json", "trtexec.txt",
)  # fmt: skip


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "fp8.safetensors"
    return bridge.calibrate(LLAMA, "fp8", samples=8, sequence=64, kv="fp8").save(path)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, calibration: Path, graphs_once: None) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("converted") / "model"
    return out, bridge.convert(LLAMA, "trt", "fp8", out, calib=calibration, kv="fp8")


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.slow
def test_the_tiny_llama_passes_every_gate(converted: tuple[Path, Any]) -> None:
    _, report = converted
    assert report.passed, report.parity
    assert {o.reference for o in report.parity.outputs} == {"source", "modelopt"}
    source = report.parity.outputs[0]
    assert source.positions >= 64
    assert abs(source.perplexity / source.reference_perplexity - 1) < 0.04  # 3 % with scales that q, k and v share
    assert not report.findings
    assert report.bytes < 0.5 * report.source_bytes


@pytest.mark.slow
def test_every_side_file_is_carried_and_the_report_is_readable(converted: tuple[Path, Any]) -> None:
    out, report = converted
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (LLAMA / name).read_bytes()
    assert json.loads((out / "report.json").read_text())["plan_digest"] == report.plan_digest
    assert "<svg" in (out / "report.html").read_text()
    assert (out / "trtexec.txt").read_text().startswith("trtexec --onnx=model.onnx")


@pytest.mark.slow
def test_the_layers_that_hurt_are_named(converted: tuple[Path, Any]) -> None:
    layers = converted[1].parity.layers
    assert len(layers) == 35
    assert [d for _, d in layers] == sorted((d for _, d in layers), reverse=True)
    assert 0.005 < layers[0][1] < 0.2  # fp8 rounds to 3 mantissa bits: some percent of each product


@pytest.mark.slow
def test_the_written_model_generates_with_and_without_its_cache_alike(tmp_path: Path) -> None:
    ids = np.array([[5, 17, 300, 41, 9]])
    bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "cached", verify=False)
    bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "plain", cache=False, verify=False)
    cached, plain = Runtime(tmp_path / "cached"), Runtime(tmp_path / "plain")
    assert cached.cached and not plain.cached
    tokens = cached.generate(ids, 12)  # weight-only: no activation code can flip between the two
    assert tokens.shape == (1, 17)
    np.testing.assert_array_equal(tokens, plain.generate(ids, 12))


@pytest.mark.slow
def test_verify_passes_on_what_was_written_and_sees_what_was_changed(
    converted: tuple[Path, Any], tmp_path: Path
) -> None:
    out, _ = converted
    assert bridge.verify(out, LLAMA).passed
    broken = tmp_path / "broken"
    shutil.copytree(out, broken)
    entry = read_header(broken / "model.safetensors").entries["model.layers.2.mlp.up_proj.weight_scale"]
    with (broken / "model.safetensors").open("r+b") as file:
        file.seek(entry.offset)
        scale = np.frombuffer(file.read(4), np.float32)
        file.seek(entry.offset)
        file.write((scale * 2).astype(np.float32).tobytes())
    report = bridge.verify(broken, LLAMA)
    assert not report.passed
    assert [t.name for t in report.parity.tensors if not t.passed] == ["model.layers.2.mlp.up_proj.weight"]


@pytest.mark.slow
def test_verify_refuses_a_tensor_that_no_plan_wrote(converted: tuple[Path, Any], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(converted[0], tmp_path / "more")
    file = tmp_path / "more/model.safetensors"
    save_file({**load_file(file), "extra": torch.zeros(2)}, file)
    with pytest.raises(VerifyError, match=r"model.safetensors also holds extra: not what the plan wrote"):
        bridge.verify(tmp_path / "more", LLAMA)


@pytest.mark.slow
def test_verify_refuses_another_source_and_another_directory(converted: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="was not made from"):
        bridge.verify(converted[0], MODELS / "tiny-gpt2")
    with pytest.raises(VerifyError, match=r"bridge did not write this model .*; name a directory that `convert` wrote"):
        bridge.verify(tmp_path, LLAMA)


@pytest.mark.slow
def test_memory_and_directory_give_the_same_files(
    converted: tuple[Path, Any], calibration: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    bridge.convert(model, "trt", "fp8", tmp_path / "memory", calib=calibration, kv="fp8", verify=False)
    for name in ("model.onnx", "model.safetensors"):
        assert (tmp_path / "memory" / name).read_bytes() == (converted[0] / name).read_bytes()


@pytest.mark.slow
def test_a_second_run_gives_the_same_bytes(converted: tuple[Path, Any], calibration: Path, tmp_path: Path) -> None:
    bridge.convert(LLAMA, "trt", "fp8", tmp_path / "again", calib=Calibration.load(calibration), kv="fp8", verify=False)
    for name in STABLE:
        assert (tmp_path / "again" / name).read_bytes() == (converted[0] / name).read_bytes(), name


@pytest.mark.slow
def test_a_calibration_that_lacks_what_the_plan_needs_is_refused(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"layers\.\{0\.\.4\}"):
        bridge.convert(LLAMA, "trt", "int4_awq", tmp_path / "out", calib=calibration)
    assert not list(tmp_path.iterdir())


def test_a_calibration_of_another_model_is_refused(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"for another model .* differ in name, shape or dtype; calibrate this model"
    ):
        bridge.convert(MODELS / "tiny-gpt2", "trt", "fp8", tmp_path / "out", calib=calibration)


@pytest.mark.slow
def test_weight_only_int8_hurts_no_layer_of_a_model_with_biases(tmp_path: Path) -> None:
    report = bridge.convert(MODELS / "tiny-gpt2", "trt", "int8_wo", tmp_path / "out")
    assert report.passed, report
    assert len(report.parity.layers) == 16
    assert report.parity.layers[0][1] < 0.02


@pytest.mark.slow
def test_an_unquantized_conversion_is_proved_too(tmp_path: Path) -> None:
    report = bridge.convert(LLAMA, "trt", None, tmp_path / "out")
    (source,) = report.parity.outputs
    assert report.passed and source.relative_l2 < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("differ", "refused"), [(False, False), (True, True)])
def test_a_tie_stored_twice_must_be_one_tensor(differ: bool, refused: bool, tmp_path: Path) -> None:
    source = made_llama()
    source.config = {**source.config, "tie_word_embeddings": True}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not differ:
        source.arrays[head] = source.arrays[embedding].copy()
    if refused:
        with pytest.raises(SourceError, match="tie_word_embeddings"):
            bridge.convert(source, "trt", "int8_wo", tmp_path / "out", verify=False)
        assert not list(tmp_path.iterdir())
    else:
        assert bridge.convert(source, "trt", "int8_wo", tmp_path / "out", verify=False).skipped[head]


@pytest.mark.slow
def test_a_nan_weight_under_a_calibrated_scheme_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    model.name_or_path = str(LLAMA)
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        bridge.convert(model, "trt", "fp8", tmp_path / "out", tokenizer=str(LLAMA))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_value_that_overflows_float16_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"  # of tiny-llama's config, whose graph other tests have exported
    shutil.copytree(LLAMA, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"].fill_(1e5)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match="does not fit float16"):
        bridge.convert(source, "trt", "int8_wo", tmp_path / "out", dtype="fp16", verify=False)


@pytest.mark.parametrize(
    ("model", "task"), [(LLAMA, "image-classification"), (MODELS / "tiny-gpt2", "sequence-classification")]
)
def test_a_task_without_a_head_is_refused_by_the_plan(model: Path, task: str) -> None:
    with pytest.raises(UsageError, match="no such head"):
        bridge.plan(model, "trt", "fp8", task=task)


def test_an_unknown_device_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tpu"):
        bridge.convert(LLAMA, "trt", "fp8", tmp_path / "out", device="tpu")


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"memory=1 kB is too little: .* give at least (\d+) bytes") as caught:
        bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "out", memory="1kB")
    with pytest.raises(UsageError, match=re.escape(str(caught.value))):
        bridge.plan(LLAMA, "trt", "int8_wo", memory="1kB")
    enough = int(str(caught.value).split()[-2])
    with pytest.raises(UsageError, match=f"give at least {enough} bytes"):
        bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "out", memory=enough - 1)


def test_too_small_a_disk_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500))
    with pytest.raises(WriteError, match=r" has 1\.5 kB free, the plan needs "):
        bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_engine_without_tensorrt_is_refused_before_the_work(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("tensorrt is installed here")
    with pytest.raises(WriteError, match="pip install"):
        bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "out", engine=True)


def test_a_graph_that_cannot_be_exported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.targets.onnx.export import export

    def refuse(*_: Any, **__: Any) -> None:
        raise ExportError("torch cannot export this architecture")

    monkeypatch.setattr(export, "export_graph", refuse)
    with pytest.raises(ExportError, match="torch cannot"):
        bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "out", verify=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_framework_is_imported_to_compare_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint without a tokenizer: its graph may be kept, and then the conversion needs none."""
    from bridge.calibration import modelopt

    imported: list[bool] = []
    monkeypatch.setattr(modelopt, "import_frameworks", lambda with_modelopt: imported.append(with_modelopt))
    shutil.copytree(LLAMA, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    report = bridge.convert(tmp_path / "model", "trt", "int8_wo", tmp_path / "out")
    assert report.passed
    assert not report.parity.outputs
    assert not imported
    bridge.convert(LLAMA, "trt", "int8_wo", tmp_path / "compared")
    assert imported == [False]


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_the_same_call_goes_on(
    converted: tuple[Path, Any], calibration: Path, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int, text: str) -> None:
        if text == "weights" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        bridge.convert(LLAMA, "trt", "fp8", tmp_path / "out", kv="fp8", calib=calibration, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert str(tmp_path / ".out.partial") in stopped.value.__notes__[0]
    bridge.convert(LLAMA, "trt", "fp8", tmp_path / "out", kv="fp8", calib=calibration, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for name in ("model.onnx", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (converted[0] / name).read_bytes()


@pytest.mark.slow
def test_a_killed_run_is_continued_and_gives_the_same_bytes(
    converted: tuple[Path, Any], calibration: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    given = f"calib={str(calibration)!r}, kv='fp8'"
    code = f"import bridge; bridge.convert({str(LLAMA)!r}, 'trt', 'fp8', {str(out)!r}, {given})"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    journal = tmp_path / ".killed.partial" / "journal.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and journal.read_text().count("\n") > 20:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with pytest.warns(BridgeWarning, match=r"continues an unfinished run, which has [1-9]\d* of \d+ tensors"):
        bridge.convert(LLAMA, "trt", "fp8", out, calib=calibration, kv="fp8", verify=False)
    assert names(tmp_path) == ["killed"]
    for name in STABLE:
        assert (out / name).read_bytes() == (converted[0] / name).read_bytes(), name


@pytest.mark.slow
def test_a_405b_checkpoint_is_planned_from_headers_without_a_framework(tmp_path: Path) -> None:
    write_sparse(tmp_path / "big", LLAMA_405B, llama_specs(LLAMA_405B))
    code = (
        "import sys, bridge\n"
        f"plan = bridge.plan({str(tmp_path / 'big')!r}, target='trt', quant='fp8')\n"
        "assert len(plan.quantized) == 126 * 7, len(plan.quantized)\n"
        "assert 4.0e11 < plan.disk < 4.2e11, plan.disk\n"
        "assert not {'torch', 'transformers', 'onnx', 'onnx_ir', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_text_that_is_too_short_is_refused_before_the_work(tmp_path: Path) -> None:
    for text in ("", "short"):
        (tmp_path / "text.txt").write_text(text)
        with pytest.raises(BridgeError, match=r"text\.txt"):
            bridge.convert(LLAMA, "trt", "fp8", tmp_path / "out", calib=tmp_path / "text.txt")
    assert names(tmp_path) == ["text.txt"]
