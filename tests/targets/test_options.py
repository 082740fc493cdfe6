"""Every option of every target leaves a trace: another plan, a refusal, or a file that a named test reads."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import BridgeError
from bridge.core.records import plain
from bridge.targets import BUILT_IN, load_target

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-llama"
SPLIT = 'base = "fp8"\n[[rule]]\nmodules = ["*.q_proj"]\nquant = "none"\n'
# (target, option) -> a value other than its default, and a scheme under which it matters
GIVEN: dict[tuple[str, str], tuple[Any, str | None]] = {
    ("gguf", "dtype"): ("fp16", None),
    ("gguf", "vocabulary"): ("quantize", "q8_0"),
    ("ort", "vocabulary"): ("quantize", "int4_wo"),
    ("hf", "format"): ("compressed-tensors", "int8_wo"),
    ("hf", "shard_size"): ("1MB", None),
    ("hf", "allow_split"): (True, "split.toml"),
    ("hf", "own_scales"): (True, "fp8"),
    ("hf", "tp"): (2, None),
    ("hf", "dtype"): ("fp16", None),
    ("megatron", "vocab_multiple"): (640, None),
    ("megatron", "spec"): ("local", None),
    ("megatron", "dtype"): ("fp16", None),
    ("mlx", "dtype"): ("fp16", None),
    ("mlx", "vocabulary"): ("keep", "affine4"),
    ("mlx", "shard_size"): ("1MB", None),
    ("torchtitan", "era"): ("0.2", None),
    ("torchtitan", "dtype"): ("fp16", None),
    ("tripy", "dtype"): ("fp16", None),
    ("tripy", "linear"): (True, "int4_wo"),
    ("trt", "dtype"): ("fp16", None),
    ("trt", "own_scales"): (True, "fp8"),
    ("trt", "custom_ops"): (True, "nvfp4"),
    ("trt", "engine"): ("rtx4090", "fp8"),
    ("trtllm", "tp"): (2, None),
    ("trtllm", "pp"): (2, None),
    ("trtllm", "dtype"): ("bf16", None),
}
# Options that no plan shows -> the test that gives them and reads their trace in the files
READ = {
    ("ort", "exact"): ("test_options.py", "test_exact_products_are_asked_of_the_session"),
    ("gguf", "drafts"): (
        "../planning/test_drafts.py",
        "test_gguf_refuses_draft_layers_that_llama_cpp_has_no_names_for",
    ),
    ("hf", "drafts"): ("../planning/test_drafts.py", "test_dropped_draft_layers_are_not_promised"),
    ("megatron", "drafts"): ("dcp/test_drafts.py", "test_dropped_draft_layers_are_not_promised"),
    ("torchtitan", "drafts"): ("dcp/test_drafts.py", "test_dropped_draft_layers_are_not_promised"),
    ("trt", "profile"): ("trt/test_rtx.py", "test_ranges_of_axes_replace_those_of_the_profiles"),
    ("trt", "task"): ("test_options.py", "test_the_task_is_that_of_the_graph"),
    ("trt", "attention_op"): (
        "trt/test_rtx.py",
        "test_the_operator_is_written_on_request_and_found_by_lint_where_no_kernel_has_it",
    ),
    ("trt", "opset"): ("test_options.py", "test_the_opset_is_that_of_the_graph"),
    ("trt", "cache"): ("trt/test_genai.py", "test_no_cache_no_file"),
    ("trt", "logits"): ("trt/test_last_token.py", "test_logits_are_those_of_the_last_token"),
}
# Options without a trace, and the test of that: a stamped graph is the whole one, only made of fewer layers
TRACELESS = {
    (target, "stamp"): ("onnx/export/test_stamp.py", "test_stamped_graph_computes_what_the_whole_one_does")
    for target in ("ort", "trt")
}
OPTIONS = [(name, option.name) for name in BUILT_IN for option in dataclasses.fields(load_target(name).Options)]


def planned(target: str, scheme: str | None, **options: Any) -> Any:
    """The plan without its options and the command that serves it, or why it is refused."""
    try:
        plan = bridge.plan(TINY, target, scheme, **options)
    except BridgeError as error:
        return str(error)
    return load_target(target).next_command(plan), plain(dataclasses.replace(plan, options={}))


def function_of(file: str, name: str) -> ast.FunctionDef:
    """A test's code."""
    nodes = ast.parse((Path(__file__).parent / file).read_text()).body
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


def gives(function: ast.FunctionDef, option: str) -> bool:
    """Whether a test gives the option to what writes the files, and asserts on what it reads afterwards."""
    given = [node.lineno for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg == option]
    asserts = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Assert)]
    return bool(given and asserts) and min(given) < max(asserts)


@pytest.mark.parametrize(("target", "option"), OPTIONS)
def test_an_option_leaves_a_trace(target: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (target, option) in READ:
        assert gives(function_of(*READ[target, option]), option)
        return
    if (target, option) in TRACELESS:
        assert function_of(*TRACELESS[target, option])
        return
    value, scheme = GIVEN[target, option]
    (tmp_path / "split.toml").write_text(SPLIT)
    monkeypatch.chdir(tmp_path)
    assert planned(target, scheme, **{option: value}) != planned(target, scheme)


def test_exact_products_are_asked_of_the_session(tmp_path: Path) -> None:
    bridge.convert(TINY, "ort", "int4_wo", tmp_path / "out", exact=True, verify=False)
    assert '"session.qdq_matmulnbits_accuracy_level": "1"' in (tmp_path / "out" / "genai_config.json").read_text()


def test_the_opset_is_that_of_the_graph(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    bridge.convert(TINY, "trt", "int8_wo", tmp_path / "out", opset=23, verify=False)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [23]


def test_the_task_is_that_of_the_graph(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    bridge.convert(TINY, "trt", "int8_wo", tmp_path / "out", task="feature-extraction", verify=False)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert "logits" not in {output.name for output in graph.graph.output}
