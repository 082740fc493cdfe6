"""Float graphs that are kept: made once for one config, never taken for another, and the same bytes from both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import bridge
from bridge.core.errors import ExportError
from bridge.core.output import cache, made_by
from bridge.sources.live_models import as_installed
from bridge.targets.trt.graph import cached
from bridge.targets.trt.graph.cached import GraphRequest, float_graph, is_kept
from bridge.targets.trt.graph.float_graph import Graph, from_bytes, to_bytes
from tests.models.graphs import export_once
from tests.targets.trt.architectures import DECODERS, bert, llama, vit

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
FRAMEWORKS = ("torch", "transformers", "onnxscript", "sympy.core")
# Converts to both targets, and prints which frameworks it holds and the digest of each file that was written.
CONVERT = """
import hashlib, json, sys
from pathlib import Path
import bridge
model, scheme, calibration, out, frameworks = sys.argv[1:5] + [sys.argv[5].split()]
bridge.convert(model, "trt", scheme, out + "/trt", calib=calibration or None, verify=bool(calibration), progress=False)
bridge.convert(model, "ort", "int8_wo", out + "/ort", verify=False, progress=False)
names = ("model.onnx", "model.safetensors", "genai_config.json", "bridge.json", "tokenizer.json")
paths = [Path(out) / target / name for target in ("trt", "ort") for name in names]
files = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
print(json.dumps([[name for name in frameworks if name in sys.modules], files]))
"""
# Two threads make graphs of different models at the same time, in a process that has loaded nothing for it.
THREADS = """
import sys, threading
from bridge.targets.trt.graph.light_import import import_onnx_ir
import_onnx_ir()
from bridge.targets.trt.graph.cached import GraphRequest, float_graph
layer = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{name}_proj" for name in ("down", "gate", "up"))]
layer += [f"self_attn.{name}_proj" for name in "koqv"]
names = ("lm_head", "model.embed_tokens", "model.norm", *(f"model.layers.0.{name}" for name in layer))
sizes = dict(num_hidden_layers=1, hidden_size=24, intermediate_size=40, num_attention_heads=3, vocab_size=50)
start, done = threading.Barrier(2), []
def make(kind):
    config = {"model_type": kind.lower(), "architectures": [f"{kind}ForCausalLM"], "num_key_value_heads": 1, **sizes}
    tensors = tuple(sorted(f"{name}.weight" for name in names))
    request = GraphRequest(config, "causal-lm", "float32", 21, True, True, tensors, {})
    start.wait()
    float_graph(request, lambda text: None)
    done.append(kind)
threads = [threading.Thread(target=make, args=(kind,)) for kind in ("Llama", "Mistral")]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*sorted(done))
"""
REQUEST = GraphRequest(
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "rope_theta": 1e4},
    "causal-lm", "float32", 21, True, True, ("lm_head.weight", "model.norm.weight"), {},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qbridge" / "graphs"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were exported, in a process whose transformers counts as loaded by bridge."""
    from bridge.targets.trt.graph import export

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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_wo", pytest.param("fp8", marks=pytest.mark.product)])
def test_the_second_conversion_loads_no_framework_and_writes_the_same_bytes(tmp_path: Path, scheme: str) -> None:
    calibration = ""  # without one a verification would load torch
    if scheme == "fp8":
        calibration = str(tmp_path / "fp8.safetensors")
        bridge.calibrate(MODEL, "fp8", samples=2, sequence=32, progress=False).save(calibration)
    results = []
    for run in ("first", "second"):
        words = (MODEL, scheme, calibration, tmp_path / run, " ".join(FRAMEWORKS))
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, "-c", CONVERT, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    (first, files), (second, same) = results
    assert first == list(FRAMEWORKS)
    assert second == []
    assert same == files


@pytest.mark.slow
def test_two_threads_make_different_graphs_at_the_same_time(folder: Path) -> None:
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert run.stdout == "Llama Mistral\n", run.stderr
    assert len(list(folder.iterdir())) == 2


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (llama(num_hidden_layers=3), "causal-lm", {}),
    "half": (
        llama(num_hidden_layers=3, tie_word_embeddings=True), "causal-lm", {"dtype": "bfloat16", "opset": 23},
    ),
    "no cache": (llama(num_hidden_layers=3), "causal-lm", {"cache": False}),
    "mixtral": (DECODERS["mixtral"](), "causal-lm", {}),
    "gemma3": (DECODERS["gemma3"](), "causal-lm", {}),
    "bert": (bert(), "feature-extraction", {}),
    "vit": (vit(), "image-classification", {}),
}  # fmt: skip
USUAL = ("llama", "half")
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
    request = request_of(llama(num_hidden_layers=3))
    assert not is_kept(request)
    first, names = float_graph(request, lambda _: None)
    assert is_kept(request)
    first.model.graph.inputs.clear()
    second, same = float_graph(replace(request), lambda _: None)
    assert exports == ["causal-lm"]
    assert second.model.graph.inputs
    assert names == same == {name: name for name in first.weights}
    (path,) = folder.iterdir()
    assert path.stat().st_size < 100_000
    assert [entry.what for entry in cache.entries()] == ["LlamaForCausalLM, 3 layers, causal-lm, float32, opset 21"]


CHANGES: dict[str, Callable[[GraphRequest], GraphRequest]] = {
    "task": lambda r: replace(r, task="feature-extraction"),
    "dtype": lambda r: replace(r, dtype="float16"),
    "opset": lambda r: replace(r, opset=23),
    "cache": lambda r: replace(r, cache=False),
    "stamp": lambda r: replace(r, stamp=False),
    "tensors": lambda r: replace(r, tensors=r.tensors[1:]),
    "tied": lambda r: replace(r, tied={"lm_head.weight": "model.embed_tokens.weight"}),
    "config": lambda r: replace(r, config={**r.config, "rope_theta": 1e5}),
    "a new entry": lambda r: replace(r, config={**r.config, "sliding_window": 7}),
    "attention": lambda r: replace(r, config={**r.config, "_attn_implementation": "eager"}),
    "architecture": lambda r: replace(r, config={**r.config, "architectures": ["MistralForCausalLM"]}),
    "a nested entry": lambda r: replace(r, config={**r.config, "rope_parameters": {"factor": 2.0}}),
    "whether transformers wrote it": lambda r: replace(r, config={**r.config, "transformers_version": "5.23.0"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_of_a_request_decides_on_its_key(change: str) -> None:
    assert CHANGES[change](REQUEST).key != REQUEST.key


@pytest.mark.parametrize("name", [*cached.PACKAGES, *made_by.OPTIONAL])
def test_the_version_of_each_package_that_makes_a_graph_decides_on_its_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, installed = REQUEST.key, made_by.installed
    monkeypatch.setattr(made_by, "installed", lambda package: "9" if package == name else installed(package))
    assert replace(REQUEST).key != before


def test_code_machine_and_environment_decide_on_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return replace(REQUEST).key

    keys = {key()}
    others = {"code": lambda: "9", "origin": lambda name: "an address" if name == "torch" else ""}
    for name, value in others.items():
        with monkeypatch.context() as other:
            other.setattr(made_by, name, value)
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
    installed = made_by.installed
    monkeypatch.setattr(made_by, "installed", lambda package: "9" if package == "diffusers" else installed(package))
    after = [replace(request).key for request in (REQUEST, denoiser)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


def test_an_editable_package_keeps_nothing(folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_by, "origin", lambda name: "editable" if name == "onnxscript" else "")
    float_graph(request_of(llama(num_hidden_layers=3)), lambda _: None)
    assert not folder.exists()


@pytest.mark.slow
def test_where_a_config_came_from_changes_no_graph_and_no_key() -> None:
    fields = json.loads(llama(num_hidden_layers=3).to_json_string(use_diff=False))
    origin = {"_name_or_path": "a", "transformers_version": "4.1"}
    graphs = [to_bytes(export_once(config), {}) for config in (llama(num_hidden_layers=3), {**fields, **origin})]
    assert graphs[0] == graphs[1]
    keys = {replace(REQUEST, config={**REQUEST.config, **origin, "_name_or_path": name}).key for name in "ab"}
    assert len(keys) == 1


def test_a_damaged_entry_is_made_anew(folder: Path, exports: list[str]) -> None:
    request = request_of(llama(num_hidden_layers=3))
    made, _ = float_graph(request, lambda _: None)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again, _ = float_graph(request, lambda _: None)
    assert exports == ["causal-lm"] * 2
    assert ir.to_proto(again.model) == ir.to_proto(made.model)
    cache.store("graphs", request.key, "", b"undamaged, and no graph")
    again, _ = float_graph(request, lambda _: None)
    assert ir.to_proto(again.model) == ir.to_proto(made.model)


def tensor_in_a_file(name: str, location: str = "/etc/passwd") -> ir.ExternalTensor:
    return ir.ExternalTensor(location, 0, 4, ir.DataType.FLOAT, shape=ir.Shape([1]), name=name)


def constant_in_a_file() -> ir.Node:
    return ir.node("Constant", [], {"value": tensor_in_a_file("data")})


def in_a_subgraph(graph: ir.Graph) -> None:
    branch = ir.Graph([], [], nodes=[constant_in_a_file()], opset_imports={"": 21})
    graph.append(ir.node("If", [graph.inputs[0]], {"then_branch": branch, "else_branch": branch}, num_outputs=0))


@pytest.mark.parametrize("where", ["weight", "initializer", "attribute", "subgraph", "function"])
def test_a_graph_that_names_a_file_is_refused(where: str) -> None:
    weight, other = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("weight", "other"))
    for value in (weight, other):
        value.shape = ir.Shape([1])
    other.const_value = ir.tensor([0.0], name="other")
    condition = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    graph = ir.Graph([condition], [], nodes=[], initializers=[weight, other], opset_imports={"": 21}, name="graph")
    model, weights = ir.Model(graph, ir_version=10), {"weight": "weight"}
    plain = Graph(model, weights, "", {}, {})
    from_bytes(to_bytes(plain, {}))
    if where == "weight":
        weights.clear()
        weight.const_value = tensor_in_a_file("weight")
    elif where == "initializer":
        other.const_value = tensor_in_a_file("other", "weights")
    elif where == "attribute":
        graph.append(constant_in_a_file())
    elif where == "subgraph":
        in_a_subgraph(graph)
    else:
        inner = ir.Graph([], [], nodes=[constant_in_a_file()], opset_imports={"": 21})
        function = ir.Function("domain", "name", graph=inner, attributes=[])
        model.functions[function.identifier()] = function
    with pytest.raises(ValueError, match="data in a file"):
        from_bytes(to_bytes(plain, {}))


def test_code_that_others_may_have_changed_makes_no_entry_and_reads_none(
    folder: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(llama(num_hidden_layers=3))
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        float_graph(request, lambda _: None)
        assert not folder.exists()
        float_graph(request, lambda _: None)
    float_graph(request, lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(as_installed, "models_are_as_installed", lambda: False)
        assert not is_kept(request)
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
