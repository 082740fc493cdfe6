"""Float graphs that are kept: made once for one config, never taken for another, and the same bytes from both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import bridge
from bridge.core.errors import ExportError
from bridge.core.output import cache, provenance
from bridge.sources.live_models import as_installed
from bridge.targets.onnx.export import cached, request
from bridge.targets.onnx.export.cached import float_graph, is_cached
from bridge.targets.onnx.export.float_graph import from_bytes, to_bytes
from bridge.targets.onnx.export.request import GraphRequest
from tests.models.graphs import export_once
from tests.oracles.diffusers_oracle import HOME, needs_diffusers
from tests.targets.onnx.export.architectures import DECODERS, bert, llama, vit
from tests.targets.onnx.export.test_cached_keys import REQUEST, TUNED

MODELS = Path(__file__).parents[4] / "examples" / "models"
FRAMEWORKS = ("torch", "transformers", "onnxscript", "sympy.core")
# Converts two models in two threads at once, and prints the frameworks that are loaded then and a digest of each file.
CONVERT = """
import hashlib, json, sys, threading
from pathlib import Path
import bridge
models, target, scheme, calibration, out, frameworks = *sys.argv[1:6], sys.argv[6].split()
given = {"calib": calibration} if calibration else {"verify": False}
jobs = {"tiny-llama": (target, scheme, given), "tiny-gpt2": ("trt", "int8_wo", {"verify": False})}
start = threading.Barrier(len(jobs))
def convert(model):
    target, scheme, options = jobs[model]
    start.wait()
    bridge.convert(f"{models}/{model}", target, scheme, f"{out}/{model}", progress=False, **options)
threads = [threading.Thread(target=convert, args=(model,)) for model in jobs]
for thread in threads: thread.start()
for thread in threads: thread.join()
names = ("model.onnx", "model.safetensors", "genai_config.json", "bridge.json", "tokenizer.json")
paths = [Path(out) / model / name for model in jobs for name in names]
files = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}
print(json.dumps([[name for name in frameworks if name in sys.modules], files]))
"""
BIASED = llama(num_hidden_layers=3, attention_bias=True)  # which no template has


Run = tuple[list[str], dict[str, str]]  # frameworks that are loaded at the end, digests of files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qbridge" / "graphs"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were exported, in a process whose transformers counts as loaded by bridge."""
    from bridge.targets.onnx.export import export

    made: list[str] = []

    def counted(config: Any, *, task: str, **options: Any) -> Any:
        made.append(task)
        return export_once(config, task=task, **options)

    monkeypatch.setattr(export, "export_graph", counted)
    monkeypatch.setattr(as_installed, "models_are_as_installed", lambda: True)
    return made


def request_of(config: Any, task: str = "causal-lm", **options: Any) -> GraphRequest:
    """A request for a config whose checkpoint has the names that the live model has."""
    graph = export_once(config, task=task, **options)
    fields = json.loads(config.to_json_string(use_diff=False))
    given = {"dtype": "float32", "opset": 21, "cache": True, "stamp": True} | options
    return GraphRequest(fields, task, **given, tensors=tuple(sorted(graph.weights.values())), tied={})


def converted(directory: Path, target: str, scheme: str, calibration: str = "") -> list[Run]:
    """Frameworks and files of two processes, one after the other, that convert the same with one cache."""
    results = []
    for run in ("first", "second"):
        words = (MODELS, target, scheme, calibration, directory / run, " ".join(FRAMEWORKS))
        env = {"XDG_CACHE_HOME": str(directory / "cache"), "PATH": "", "PYTHONPATH": str(MODELS.parents[1])}
        command = [sys.executable, "-c", CONVERT, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        loaded, files = json.loads(done.stdout.splitlines()[-1])
        results.append((loaded, files))
    return results


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return converted(tmp_path_factory.mktemp("usual"), "ort", "int8_wo")


@pytest.mark.slow
def test_the_second_conversion_loads_no_framework(usual: list[Run]) -> None:
    assert [loaded for loaded, _ in usual] == [list(FRAMEWORKS), []]


@pytest.mark.slow
def test_both_conversions_write_the_same_bytes(usual: list[Run]) -> None:
    (_, first), (_, second) = usual
    assert first == second


@pytest.mark.slow
def test_two_threads_make_different_graphs_at_the_same_time(usual: list[Run]) -> None:
    graphs = [name for name in usual[0][1] if name.endswith("model.onnx")]
    assert graphs == ["tiny-llama/model.onnx", "tiny-gpt2/model.onnx"]


@pytest.mark.product
def test_a_calibration_file_with_outputs_needs_no_framework_either(tmp_path: Path) -> None:
    calibration = tmp_path / "fp8.safetensors"
    bridge.calibrate(MODELS / "tiny-llama", "fp8", samples=2, sequence=32, progress=False).save(calibration)
    (_, first), (loaded, second) = converted(tmp_path, "trt", "fp8", str(calibration))
    assert loaded == []
    assert first == second


@pytest.mark.product
@needs_diffusers
def test_the_graph_of_a_denoiser_is_kept_too(tmp_path: Path) -> None:
    env = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": "",
        "PYTHONPATH": os.pathsep.join((str(MODELS.parents[1]), str(HOME))),
    }

    def lines(code: str, *words: object) -> list[str]:
        run = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    lines("import sys; from tests.models.diffusion_models import save; save('dit', sys.argv[1])", tmp_path / "model")
    code = (
        "import sys, bridge\n"
        "bridge.convert(sys.argv[1], 'trt', 'int8_wo', sys.argv[2], verify=False, progress=False)\n"
        "print('torch' in sys.modules, 'diffusers' in sys.modules)"
    )
    loaded = [lines(code, tmp_path / "model", tmp_path / run)[-1] for run in ("first", "second")]
    assert loaded == ["True True", "False False"]
    first, second = ((tmp_path / run / "model.onnx").read_bytes() for run in ("first", "second"))
    assert first == second


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (llama(num_hidden_layers=3), "causal-lm", {}),
    "half": (
        llama(num_hidden_layers=1, tie_word_embeddings=True), "causal-lm", {"dtype": "bfloat16", "opset": 23},
    ),
    "no cache": (llama(num_hidden_layers=3), "causal-lm", {"cache": False}),
    "mixtral": (DECODERS["mixtral"](), "causal-lm", {}),
    "gemma3": (DECODERS["gemma3"](), "causal-lm", {}),
    "bert": (bert(), "feature-extraction", {}),
    "vit": (vit(), "image-classification", {}),
}  # fmt: skip
USUAL = ("half",)
MORE = [pytest.param(case, marks=pytest.mark.product) for case in CASES if case not in USUAL]


@pytest.mark.parametrize("case", [*USUAL, *MORE])
def test_a_graph_that_is_read_is_the_one_that_was_made(case: str) -> None:
    config, task, options = CASES[case]
    graph = export_once(config, task=task, **options)
    proto = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    data = to_bytes(graph, {"a": "b"})
    assert ir.to_proto(graph.model).SerializeToString(deterministic=True) == proto  # its own weights have no data again
    again, names = from_bytes(data)
    assert names == {"a": "b"}
    assert ir.to_proto(again.model).SerializeToString(deterministic=True) == proto
    for key in ("weights", "note", "tied", "text"):
        assert getattr(again, key) == getattr(graph, key)
    assert {n for n, v in again.model.graph.initializers.items() if v.const_value is None} == set(graph.weights)
    assert to_bytes(again, names) == data
    assert len(data) < 100_000


def test_equal_requests_are_exported_once_and_each_gets_its_own_graph(folder: Path, exports: list[str]) -> None:
    request = request_of(BIASED)
    assert not is_cached(request)
    first, names = float_graph(request, lambda _: None)
    assert is_cached(request)
    first.model.graph.inputs.clear()
    second, same = float_graph(replace(request), lambda _: None)
    assert exports == ["causal-lm"]
    assert second.model.graph.inputs
    assert names == same == {name: name for name in first.weights}
    (path,) = folder.iterdir()
    assert path.stat().st_size < 100_000
    assert [entry.what for entry in cache.entries()] == ["LlamaForCausalLM, 3 layers, causal-lm, float32, opset 21"]


def test_the_progress_says_whether_a_graph_is_made_or_kept(folder: Path, exports: list[str]) -> None:
    request = request_of(BIASED)
    texts: list[str] = []
    float_graph(request, texts.append)
    assert "graph: kept" not in texts
    texts.clear()
    float_graph(request, texts.append)
    assert texts == ["graph: kept"]


def test_the_progress_says_who_else_makes_the_graph(
    folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(BIASED)
    texts: list[str] = []
    monkeypatch.setattr(cache, "MAX_WAIT", 0.1)  # then it goes on without
    with cache.exclusively("graphs", request.key):
        float_graph(request, texts.append)
    assert texts[0] == "graph: another process makes it"
    texts.clear()
    monkeypatch.setattr(cached, "_MAKING", lock := threading.Lock())
    lock.acquire()

    def hear(text: str) -> None:
        texts.append(text)
        lock.release()

    float_graph(replace(request, tensors=request.tensors[::-1]), hear)
    assert texts == ["graph: another thread makes one"]


@pytest.mark.parametrize("name", [*request.PACKAGES, *provenance.OPTIONAL])
def test_the_version_of_each_package_that_makes_a_graph_decides_on_its_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, installed = REQUEST.key, provenance.installed
    monkeypatch.setattr(provenance, "installed", lambda package: "9" if package == name else installed(package))
    assert replace(REQUEST).key != before


def test_code_machine_and_environment_decide_on_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return replace(REQUEST).key

    keys = {key()}
    others = {"code": lambda: "9", "origin": lambda name: "an address" if name == "torch" else ""}
    for name, value in others.items():
        with monkeypatch.context() as other:
            other.setattr(provenance, name, value)
            keys.add(key())
    with monkeypatch.context() as other:
        other.setattr("platform.machine", lambda: "aarch64")
        keys.add(key())
    with monkeypatch.context() as other:
        other.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        keys.add(key())
    assert len(keys) == 5
    for name in ("TRANSFORMERS_VERBOSITY", "TORCHINDUCTOR_CACHE_DIR"):  # which the command line and torch set
        monkeypatch.setenv(name, "other")
    assert key() in keys


def test_diffusers_decides_on_the_key_of_its_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = replace(REQUEST, config={"_class_name": "DiTTransformer2DModel"}, task="denoising")
    before = [replace(request).key for request in (REQUEST, denoiser)]
    installed = provenance.installed
    monkeypatch.setattr(provenance, "installed", lambda package: "9" if package == "diffusers" else installed(package))
    after = [replace(request).key for request in (REQUEST, denoiser)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


def test_an_editable_package_keeps_nothing(folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "origin", lambda name: "editable" if name == "onnxscript" else "")
    float_graph(request_of(BIASED), lambda _: None)
    assert not folder.exists()


def test_fine_tunes_share_a_graph_and_have_their_own_tokens(folder: Path, exports: list[str]) -> None:
    assert TUNED.keys() == {*request.TRAINING, *request.DECODING}
    first = request_of(BIASED)
    float_graph(first, lambda _: None)
    tuned = replace(first, config={**first.config, **TUNED})
    graph, _ = float_graph(tuned, lambda _: None)
    assert len(exports) == 1
    assert (graph.text["bos_token_id"], graph.text["eos_token_id"]) == (4, [5, 6])
    for other in (replace(tuned, task="text-classification"), replace(tuned, config={**TUNED, "pad_token_id": 3})):
        assert other.key != tuned.key
    without = replace(tuned, config={**tuned.config, "eos_token_id": None})
    assert without.key != tuned.key  # whose tokens transformers fills in


def test_a_damaged_entry_is_made_anew(folder: Path, exports: list[str]) -> None:
    request = request_of(BIASED)
    made, _ = float_graph(request, lambda _: None)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again, _ = float_graph(request, lambda _: None)
    assert exports == ["causal-lm"] * 2
    assert ir.to_proto(again.model) == ir.to_proto(made.model)
    cache.store("graphs", request.key, "", b"undamaged, and no graph")
    again, _ = float_graph(request, lambda _: None)
    assert ir.to_proto(again.model) == ir.to_proto(made.model)


def test_code_that_others_may_have_changed_makes_no_entry_and_reads_none(
    folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(BIASED)
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        float_graph(request, lambda _: None)
        assert not folder.exists()
        float_graph(request, lambda _: None)
    float_graph(request, lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        assert not is_cached(request)
        float_graph(request, lambda _: None)
    assert exports == ["causal-lm"] * 4
    float_graph(request, lambda _: None)
    assert exports == ["causal-lm"] * 4


def test_what_cannot_be_exported_is_not_kept(folder: Path, exports: list[str]) -> None:
    request = replace(request_of(llama(num_hidden_layers=3)), tensors=("model.norm.weight",))
    for _ in range(2):
        with pytest.raises(ExportError, match="the checkpoint lacks"):
            float_graph(request, lambda _: None)
    assert exports == ["causal-lm"] * 2
    assert list(folder.iterdir()) == []


def test_a_template_is_filled_in_and_nothing_is_kept(
    folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(llama(num_hidden_layers=3))
    texts: list[str] = []
    assert is_cached(request)
    graph, names = float_graph(request, texts.append)
    assert names == {name: name for name in graph.weights}
    assert texts == ["graph: template of llama"]
    assert exports == [] and not folder.exists()
    monkeypatch.setattr(as_installed, "models_are_as_installed", lambda: False)
    float_graph(request, texts.append)
    assert exports == ["causal-lm"]


@pytest.mark.slow
def test_the_first_conversion_with_a_template_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys, bridge\n"
        "bridge.convert(sys.argv[1], sys.argv[2], 'int8_wo', sys.argv[3], verify=False, progress=False)\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "", "PYTHONPATH": str(MODELS.parents[1])}
    for target in ("trt", "ort"):
        words = [sys.executable, "-c", code, str(MODELS / "tiny-llama"), target, str(tmp_path / target)]
        run = subprocess.run(words, capture_output=True, text=True, env=env)
        assert run.stdout.splitlines()[-1:] == ["[]"], run.stderr
