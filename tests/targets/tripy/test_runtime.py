"""The runner answers from the compiled module, or says that it does not; the example continues a sentence."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import VerifyError
from bridge.targets.tripy import runtime
from tests.targets.tripy.models import config, expected, filled, ids, model, write

EXAMPLE = Path(__file__).parents[3] / "examples" / "tripy_generate.py"
TINY = EXAMPLE.parent / "models" / "tiny-gpt2"
Capture = pytest.CaptureFixture[str]
FEEDS = {"input_ids": ids().numpy(), "attention_mask": np.ones((2, 70), np.int64)}


def apart(found: np.ndarray, wanted: Any) -> float:
    return float(np.linalg.norm(found - np.asarray(wanted)) / np.linalg.norm(wanted))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: the stand-in needs none."""
    monkeypatch.setattr(runtime, "_need_gpu", lambda: None)


@pytest.mark.slow
def test_compiled_module_answers_as_transformers(gpu: None, tp: Any, tmp_path: Path) -> None:
    source = model("gpt2-bare")
    made = runtime.Runtime(write(source, tmp_path / "out"))
    assert made.substitute == ""
    assert apart(made.run(FEEDS)["output 0"], expected(source, ids())) <= 5e-6


def test_without_a_gpu_the_weights_run_in_transformers(tmp_path: Path) -> None:
    source = model("gpt2-bare")
    made = runtime.Runtime(write(source, tmp_path / "out"))
    assert (
        made.substitute == "its weights in the transformers model (Tripy runs on NVIDIA GPUs, and there is none here)"
    )
    assert apart(made.run(FEEDS)["output 0"], expected(source, ids())) <= 5e-6


def test_architecture_without_a_module_runs_in_transformers(gpu: None, tp: Any, tmp_path: Path) -> None:
    from tests.models.export_families import build

    made = runtime.Runtime(write(build("gemma"), tmp_path / "out"))
    assert "no ready Tripy module for GemmaForCausalLM" in made.substitute


def test_file_that_does_not_load_is_broken_not_unproved(gpu: None, tp: Any, tmp_path: Path) -> None:
    out = write(model("gpt2-bare"), tmp_path / "out")
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(VerifyError, match=r"the written model does not load: .*shorter than"):
        runtime.Runtime(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quant", "options", "tolerance"),
    [
        pytest.param("tiny-gpt2", "int8_wo", {}, 2e-6, marks=pytest.mark.product),
        pytest.param("tiny-gpt2", "int4_awq", {}, 2e-6, marks=pytest.mark.product),
        ("tiny-gpt2", "int4_wo", {"linear": True}, 2e-6),
        pytest.param("tiny-llama", "int4_awq", {}, 2e-6, marks=pytest.mark.product),
        # The substitute leaves activations alone: this only shows that input and pre-scales are where they belong.
        ("tiny-gpt2", "int8_sq", {}, 5e-2),
        ("tiny-llama", "fp8", {}, 5e-2),
    ],
)
def test_compiled_module_and_dequantized_twin_agree(
    name: str, quant: str, options: dict[str, Any], tolerance: float, tp: Any, tmp_path: Path
) -> None:
    """Blocks, transposes and pre-scales, read by two programs: Tripy's Q/DQ, and ours undone for transformers."""
    out = write(TINY.parent / name, tmp_path / "out", quant, **options)
    feeds = {"input_ids": ids(900, 24).numpy()}
    substitute = runtime.Runtime(out).run(feeds)["output 0"]
    assert apart(runtime.Compiled(filled(out)).run(feeds)["output 0"], substitute) <= tolerance


def example() -> Any:
    spec = importlib.util.spec_from_file_location("tripy_generate", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_example_continues_from_a_written_directory(tp: Any, tmp_path: Path, capsys: Capture) -> None:
    """The module is compiled once and takes every length on the way."""
    out = write(TINY, tmp_path / "kept", "int8-weight-only", dtype="fp16")
    given = ["--model", str(out), "--input-text", "This function returns", "--max-new-tokens", "6", "--seed", "3"]
    example().main(given)
    text = capsys.readouterr().out
    assert text.startswith("This function returns") and len(text) > len("This function returns\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "times"),
    [
        *(pytest.param(mode, 2, marks=pytest.mark.product) for mode in ("none", "int8-weight-only")),
        pytest.param("int4-weight-only", 1, marks=pytest.mark.product),
        ("float8", 2),
    ],
)
def test_example_generates_in_every_mode(mode: str, times: int, tp: Any, capsys: Capture) -> None:
    said = []
    for _ in range(times):
        example().main(["--input-text", "The value of", "--quant-mode", mode, "--max-new-tokens", "3", "--seed", "1"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[-1] and said[0].startswith("The value of") and len(said[0]) > len("The value of\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--input-text", "If", "--max-new-tokens", "600"], "600 tokens; the model has 512 positions"),
        (["--input-text", ""], "0 tokens to continue and 10 new ones"),
        (["--input-text", "If", "--max-new-tokens", "0"], "2 tokens to continue and 0 new ones"),
        (["--input-text", "If", "--model", "{bert}"], "no ready Tripy module that writes text for BertForMaskedLM"),
        (["--input-text", "If", "--model", "{wordless}"], "no tokenizer beside the weights"),
        (["--input-text", "If", "--model", "{wordless}/absent"], "absent"),
    ],
)
def test_example_refuses_before_it_converts(
    given: list[str], said: str, tp: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "convert", None, raising=False)
    for name, directory in (("bert-words", "bert"), ("gpt2", "wordless")):
        config(name).save_pretrained(tmp_path / directory)
    with pytest.raises(SystemExit):
        example().main([word.format(bert=tmp_path / "bert", wordless=tmp_path / "wordless") for word in given])
    assert said in capsys.readouterr().err


def test_example_without_nvtripy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtripy", None)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--input-text", "If"])
    install = re.escape("pip install nvtripy -f https://nvidia.github.io/TensorRT-Incubator/packages.html")
    with pytest.raises(SystemExit, match=install):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
