"""Experts that are stacked in one module: the operands and results of each, and that the model stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.workflows.inspect.hooks.experts import ExpertsWatch  # noqa: E402
from bridge.workflows.inspect.layers import EXPERT, Layer, layers_of  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

SIX = frozenset({"activation", "weight", "output", "gradient", "dgrad", "wgrad"})
FAMILIES = ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM"]
WAYS = ["eager", "grouped_mm", "batched_mm"]
Told = dict[tuple[Layer, str], Any]


def model_of(family: str, way: str = "eager") -> Any:
    torch.manual_seed(4)
    model = (built("mixtral") if family == "MixtralForCausalLM" else build(family)).float()
    model.set_experts_implementation(way)
    return model


def run(model: Any) -> list[Any]:
    model.zero_grad()
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return [out.logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def watched(model: Any, told: Told, wanted: frozenset[str] = SIX) -> list[ExpertsWatch]:
    modules: dict[str, dict[Layer, frozenset[str]]] = {}
    for layer in layers_of(model):
        if layer.kind == EXPERT:
            modules.setdefault(layer.module, {})[layer] = wanted
    return [
        ExpertsWatch(
            model.get_submodule(name), layers, lambda layer, name, x: told.__setitem__((layer, name), x.clone())
        )
        for name, layers in modules.items()
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_seen_are_the_operands_and_results_of_each_expert(family: str, way: str) -> None:
    model = model_of(family, way)
    told: Told = {}
    watches = watched(model, told)
    run(model)
    for watch in watches:
        watch.detach()
    active = [layer for layer, name in told if name == "activation"]
    assert {layer.parameter for layer in active} == {"gate_up_proj", "down_proj"} and len(active) > 6
    for layer in active:
        seen = {name: told[layer, name] for name in SIX}
        stack = model.get_submodule(layer.module).get_parameter(layer.parameter)
        matrix = stack.detach()[layer.expert].t() if layer.turned else stack.detach()[layer.expert]
        close = torch.testing.assert_close
        assert torch.equal(seen["weight"], matrix)
        close(seen["output"], seen["activation"] @ matrix.t())
        close(seen["dgrad"], seen["gradient"] @ matrix)
        close(seen["wgrad"], seen["gradient"].t() @ seen["activation"])


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_a_model_that_is_not_inspected(way: str) -> None:
    """Other implementations run as the plain one while they are inspected, and as before afterwards."""
    plain = run(model_of("MixtralForCausalLM", "eager" if way == "batched_mm" else way))
    model = model_of("MixtralForCausalLM", way)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    unwatched = run(model)
    watches = watched(model, {})
    seen = run(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    for watch in watches:
        watch.detach()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert not any(each._backward_hooks for each in model.parameters())
    assert model.config._experts_implementation == way
    assert all(torch.equal(a, b) for a, b in zip(unwatched, run(model), strict=True))


def test_a_forward_that_is_left_leaves_nothing_behind() -> None:
    class Stop(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    model = model_of("MixtralForCausalLM")
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = Stop()
    watches = watched(model, {})
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert torch.overrides._get_current_function_mode_stack() == []
    for watch in watches:
        watch.detach()
    assert "forward" not in vars(experts)


def test_a_recompute_is_not_seen_again() -> None:
    model = model_of("Qwen3MoeForCausalLM").train()
    told: list[tuple[str, str]] = []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    modules: dict[str, dict[Layer, frozenset[str]]] = {}
    for layer in layers_of(model):
        if layer.kind == EXPERT:
            modules.setdefault(layer.module, {})[layer] = SIX
    for name, layers in modules.items():
        ExpertsWatch(model.get_submodule(name), layers, lambda layer, name, _: told.append((layer.name, name)))
    run(model)
    assert len(told) == len(set(told)) and {name for _, name in told} == SIX


def test_a_copy_of_a_stack_is_known() -> None:
    """torchtitan multiplies by `w1.bfloat16().transpose(-2, -1)`."""

    class GroupedExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = torch.nn.Parameter(torch.randn(3, 6, 4))

        def forward(self, x: Any) -> Any:
            w = self.w1.bfloat16().transpose(-2, -1)
            return torch.cat([rows.bfloat16() @ w[e] for e, rows in enumerate(x.split([2, 0, 3]))])

    model = torch.nn.Sequential(GroupedExperts())
    told: Told = {}
    watched(model, told)
    model(torch.randn(5, 4)).float().sum().backward()
    rows = {(layer.expert, name): tensor.shape for (layer, name), tensor in told.items()}
    assert rows[0, "activation"] == (2, 4) and rows[2, "gradient"] == (3, 6)
    assert (
        rows[1, "weight"] == rows[1, "wgrad"] == (6, 4) and told[layers_of(model)[1], "weight"].dtype == torch.float32
    )


def test_a_session_tells_experts() -> None:
    """Statistics of each expert; one that no token came to is noted, and padding counts."""
    model = model_of("MixtralForCausalLM")
    stats = {"LogTensorStats": {"enabled": True, "tensors": ["activation", "weight"], "stats": ["numel", "rms"]}}
    config = {"s": {"enabled": True, "layers": {"roles": ["moe.down"]}, "transformer_engine": stats}}
    ids = torch.full((1, 4), 7)
    mask = torch.tensor([[1, 1, 1, 0]])
    with bridge.inspecting(model, config) as session, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        session.step()
    told = {(r.layer, r.tensor, r.stat): r.value for r in session.inspection.records}
    rows = sum(value or 0 for (_, tensor, stat), value in told.items() if (tensor, stat) == ("activation", "numel"))
    assert rows == 2 * 4 * 2 * model.config.intermediate_size  # layers, tokens, experts a token
    assert len([key for key in told if key[1:] == ("weight", "rms")]) == 2 * 5
    notes = session.inspection.notes
    assert any(note.startswith("activation was due and not seen: no token came") for note in notes)
    assert any("padding counts in activation" in note for note in notes)


def test_grouped_modules_of_megatron_are_noted() -> None:
    """Their parameters have no third axis: weight0, weight1, or weight1 and weight2 of all experts."""
    grouped = type("TEColumnParallelGroupedLinear", (torch.nn.Module,), {})()
    grouped.weight0 = torch.nn.Parameter(torch.empty(4, 6))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "linear_fc1": grouped})
    stats = {"LogTensorStats": {"enabled": True, "tensors": ["output"], "stats": ["rms"]}}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": stats}}
    with bridge.inspecting(model, config) as session:
        model["a"](torch.ones(2, 3))
        session.step()
    assert [record.layer for record in session.inspection.records] == ["a"]
    (note,) = session.schemes.note_lines()
    assert note == (
        "experts of a grouped module of Megatron-Core are not seen; build it with moe_grouped_gemm=False: 1 layer "
        "(linear_fc1)"
    )
