"""Experts of classes that choose them in a way of their own: all of them on all tokens, against transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import UsageError
from bridge.core.parsing.typed_json import typed
from bridge.planning.plan import Plan
from bridge.targets.onnx.export.experts import unstack_experts
from bridge.targets.onnx.export.family import replace_methods
from bridge.targets.onnx.export.tasks import choose_task
from tests.sweep.build import build, feeds

FAMILIES = ["JetMoe", "Dbrx", "LongcatFlash", "Llama4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_equal_transformers(family: str) -> None:
    model = build(f"{family}ForCausalLM", torch.float32)
    given = feeds(model)
    with torch.no_grad():
        want = model(**given).logits
        replace_methods(model)
        unstack_experts(model, stacked=True)
        torch.testing.assert_close(model(**given).logits, want, rtol=1e-4, atol=1e-5)


def test_a_token_beyond_the_capacity_of_its_expert_has_none() -> None:
    model = build("SwitchTransformersForConditionalGeneration", torch.float32)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 4
    given = feeds(model)
    with torch.no_grad():
        want = model(**given).logits
        replace_methods(model)
        unstack_experts(model)
        got = model(**given, use_cache=True).logits  # transformers hands this to the encoder, which raises
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [(False, False), (False, True), (True, True)])
def test_each_text_goes_through_the_adapters_of_its_language(norms: tuple[bool, bool]) -> None:
    model = build("XmodForMaskedLM", torch.float32)
    fields = {
        "languages": ["en_XX", "de_DE", "fr_XX"],
        "ln_before_adapter": norms[0],
        "adapter_reuse_layer_norm": norms[1],
    }
    config = type(model.config)(**(model.config.to_dict() | fields))
    model = type(model)(config).eval()
    given = feeds(model, rows=3) | {"lang_ids": torch.tensor([2, 0, 1])}
    with torch.no_grad():
        want = model(**given).logits
        replace_methods(model)
        unstack_experts(model)
        torch.testing.assert_close(model(**given).logits, want, rtol=1e-4, atol=1e-5)
        other = model(**given | {"lang_ids": torch.tensor([2, 0, 0])}).logits
    assert torch.equal(other[:2], model(**given).logits[:2]) and not torch.equal(other[2], want[2])


@pytest.mark.slow
def test_quantized_experts_of_heads_and_of_layers_are_verified(tmp_path: Path) -> None:
    """A recipe names them: no server is known to read them from a checkpoint, but a graph has them."""
    model = build("JetMoeForCausalLM", torch.float32)
    recipe = tmp_path / "experts.toml"
    rule = '[[rule]]\nmodules = ["*put_linear"]\nquant = "int8_wo"\noverride = true\n'
    recipe.write_text(f'base = "int8_wo"\n{rule}')
    data = [feeds(model, seed) for seed in range(2)]
    report = bridge.convert(copy.deepcopy(model), "trt", recipe, tmp_path / "out", data=data, progress=False)
    assert report.passed, report
    plan: Any = typed(Plan, json.loads((tmp_path / "out" / "bridge.json").read_text())["plan"])
    experts = [step for step in plan.quantized if step.inputs[0].expert is not None]
    assert len(experts) == 2 * 4 * 3  # layers, stacks of each, experts


def test_transformers_runs_two_experts_of_nllb_so_that_nothing_shows_a_graph_to_be_right() -> None:
    """When this fails, transformers chooses experts again, and a graph can be held to it."""
    model = build("NllbMoeForConditionalGeneration", torch.float32)
    given = feeds(model)
    with torch.no_grad():
        want = model(**given).logits
        for name, parameter in model.named_parameters():
            if ".expert_2." in name or ".expert_3." in name:
                parameter.zero_()
        assert torch.equal(model(**given).logits, want)
    with pytest.raises(UsageError, match="has no graphs: transformers 5 runs its first two experts"):
        choose_task(None, type(model).__name__)
