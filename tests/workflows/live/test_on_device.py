"""What a server loads is encoded where the weights are, and stays there: the bytes of the host.

There is no GPU here: plain torch takes the place of the host's kernels, for tensors of the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import SourceError
from bridge.quant.codec import on_device
from bridge.quant.codec.on_device import TORCH
from bridge.workflows.live import encoding
from tests.covering import grid
from tests.models.decoder_families import build
from tests.workflows.live.families import FIELDS, SCHEMES


def made(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return build(family, dtype, **FIELDS[family])


def on_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Encode by plain torch where a GPU's tensors are; the names of what the host writes all the same."""
    names: list[str] = []
    plain = encoding.write_step

    def counted(step: Any, *rest: Any) -> Any:
        names.append(step.outputs[0].spec.name)
        return plain(step, *rest)

    monkeypatch.setattr(on_device, "best_way", lambda tensor: TORCH)
    monkeypatch.setattr(encoding, "write_step", counted)
    return names


@grid(
    {"family": ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"], "scheme": SCHEMES},
    fast=[("LlamaForCausalLM", "nvfp4_wo"), ("LlamaForCausalLM", "fp8_block"), ("LlamaForCausalLM", None)],
)
def test_tensors_are_those_of_the_host(family: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(family)
    source = bridge.tensors(model, "vllm", scheme)
    wanted = source.digest()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hosted = on_host(monkeypatch)
    assert source.digest() == wanted
    quantized = {step.outputs[0].spec.name for step in source.plan.quantized}
    assert {*hosted} == (quantized if scheme == "int4:rtn" else set())  # its scales are searched for
    for _, tensor in source:
        tensor.view(-1).view(torch.uint8).zero_()  # it has memory of its own
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_plain_tensors_are_cast_where_they_are_and_refused_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("LlamaForCausalLM", torch.float32)
    source = bridge.tensors(model, "hf", None, dtype="fp16")
    wanted = source.digest()
    hosted = on_host(monkeypatch)
    assert source.digest() == wanted and hosted == []
    for value, text in ((7e4, "70000 does not fit float16"), (float("nan"), "holds NaN or infinity")):
        with torch.no_grad():
            model.model.norm.weight[3] = value
        with pytest.raises(SourceError, match=f"model.norm.weight: {text}"):
            source.digest()


def test_a_weight_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("LlamaForCausalLM")
    source = bridge.tensors(model, "vllm", "fp8_block")
    on_host(monkeypatch)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = float("nan")
    with pytest.raises(SourceError, match=f"{name}: holds NaN or infinity"):
        source.digest()
