"""A model in memory whose weights are coded where they are becomes the files that the host writes, byte for byte.

There is no GPU here: plain torch takes the place of the host's kernels, for tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import SourceError
from bridge.quant.codec import on_device
from bridge.quant.codec.on_device import TORCH
from bridge.sources.memory import MemorySource
from bridge.sources.opening import open_source
from bridge.streaming import encode
from tests.sources.tiny_families import build

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The weights that were coded where they are."""
    names: list[str] = []
    plain = encode.encode_on_device

    def counted(step: Any, *rest: Any) -> bool:
        names.append(step.source)
        return plain(step, *rest)

    monkeypatch.setattr(encode, "encode_on_device", counted)
    yield names


def force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "best_way", lambda tensor: TORCH)


def files(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.safetensors")} | {
        path.name: path.read_bytes() for path in out.rglob("*.data")
    }


ROWS = [
    *(
        ("hf", scheme, {})
        for scheme in ("fp8_pc_pt", "fp8_block_dynamic", "int8_wo", "nvfp4_wo", "mxfp8_wo", "mxfp4_wo")
    ),
    *(("hf", scheme, {"format": "compressed-tensors"}) for scheme in ("int4_wo", "int8_wo", "nvfp4_wo", "mxfp4_wo")),
    ("hf", "int4_wo", {}),
    ("trtllm", "int8_wo", {"tp": 2}),
    ("trt", "int4_wo", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "scheme", "options"), ROWS)
def test_files_are_those_of_the_host(
    target: str,
    scheme: str,
    options: Any,
    model: Any,
    coded: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge.convert(model, target, scheme, tmp_path / "host", verify=False, **options)
    assert not coded
    force(monkeypatch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bridge.convert(model, target, scheme, tmp_path / "device", verify=False, **options)
    assert len(coded) >= 14
    assert files(tmp_path / "device") == files(tmp_path / "host") != {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_experts_of_a_stack_are_coded_where_it_is(
    coded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mixtral")
    bridge.convert(model, "hf", "fp8_pc_pt", tmp_path / "host", verify=False)
    force(monkeypatch)
    bridge.convert(model, "hf", "fp8_pc_pt", tmp_path / "device", verify=False)
    assert any("experts.4" in name for name in coded)
    assert files(tmp_path / "device") == files(tmp_path / "host") != {}


@pytest.mark.slow
def test_zeros_are_told_and_a_nan_is_refused(coded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    force(monkeypatch)
    weights = dict(model.named_parameters())
    zeros, name = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    with torch.no_grad():
        weights[zeros].zero_()
    report = bridge.convert(model, "hf", "int8_wo", tmp_path / "zeros", verify=False)
    assert zeros in coded and "all zero" in str(report.to_json())
    with torch.no_grad():
        weights[name][3, 5] = float("nan")
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.q_proj\.weight: holds NaN or infinity"):
        bridge.convert(model, "hf", "int8_wo", tmp_path / "bad", verify=False)
    assert not (tmp_path / "bad").exists()


def test_a_model_on_the_cpu_is_coded_by_the_host() -> None:
    source = open_source(build("llama"))
    assert isinstance(source, MemorySource)
    assert source.on_device("model.layers.0.mlp.up_proj.weight") is None
