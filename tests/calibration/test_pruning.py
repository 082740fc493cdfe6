"""Scores of a cut against ModelOpt's hooks, and repaired matrices against a solver of least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridge.calibration.data import Data, prepare
from bridge.calibration.importance.measure import Measured, measure_scores
from bridge.planning.structure import structure_of
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import Cut, plan_cut
from tests.models.decoder_families import build

random = torch.Generator().manual_seed(0)
BATCHES = [{"input_ids": torch.randint(3, 97, (rows, 24), generator=random)} for rows in (8, 7, 9, 3)]


def measured(
    family: str, keep: dict[str, int], config: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Cut, Measured]:
    model = build(family, torch.float32, **(config or {}))
    source = open_source(model)
    cut = plan_cut(source, keep, None)
    data = prepare(BATCHES, source)
    return model, cut, measure_scores(cut, structure_of(source), data, **options)


def inputs_of(model: Any, names: list[str]) -> dict[str, list[torch.Tensor]]:
    """What each module reads in every batch that calibrates."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
        for name in names
    ]
    with torch.no_grad():
        for batch in prepare(BATCHES, open_source(model)).batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("family", "reader", "keep"),
    [
        ("LlamaForCausalLM", "model.layers.{}.mlp.down_proj", {"ffn": 40}),
        ("LlamaForCausalLM", "model.layers.{}.self_attn.o_proj", {"heads": 4}),
        ("GPT2LMHeadModel", "transformer.h.{}.mlp.c_proj", {"ffn": 40}),
    ],
)
def test_minitron_scores_equal_modelopts_hook(family: str, reader: str, keep: dict[str, int]) -> None:
    from modelopt.torch.prune.importance_hooks.base_hooks import L2NormHook

    model, cut, found = measured(family, keep, importance="minitron")
    (dim,) = keep
    seen = inputs_of(model, [reader.format(layer) for layer in range(2)])
    for layer in range(2):
        hook = L2NormHook()
        for x in seen[reader.format(layer)]:
            hook(model, (x.transpose(0, 1),), x)
        want = torch.linalg.vector_norm(hook.accumulate().view(cut.before[dim], -1), ord=2, dim=1)
        assert torch.equal(torch.from_numpy(found.scores[dim][layer, None]), want)


@pytest.mark.parametrize(
    ("family", "reader", "keep"),
    [
        ("LlamaForCausalLM", "model.layers.{}.mlp.down_proj", {"ffn": 40}),
        ("LlamaForCausalLM", "model.layers.{}.self_attn.o_proj", {"heads": 4}),
        ("GPT2LMHeadModel", "transformer.h.{}.mlp.c_proj", {"ffn": 40}),
    ],
)
def test_a_repaired_matrix_is_the_least_squares_solution(family: str, reader: str, keep: dict[str, int]) -> None:
    model, cut, found = measured(family, keep, repair=True)
    pruned = cut.pruned(found.scores, repaired=found.repaired)
    small = pruned.load_model()
    seen = inputs_of(model, [reader.format(layer) for layer in range(2)])
    (dim,) = keep
    for layer in range(2):
        name = reader.format(layer)
        x = torch.cat([part.flatten(0, 1) for part in seen[name]]).double()
        weight, new = (part.get_submodule(name).weight.double() for part in (model, small))
        if family.startswith("GPT2"):
            weight, new = weight.T, new.T
        width = x.shape[1] // cut.before[dim]
        kept = (pruned.kept.positions(dim, layer, None)[:, None] * width + np.arange(width)).reshape(-1)
        ridge = (1e-3 * x.square().sum() / x.shape[1]).sqrt()
        rows = torch.cat([x[:, kept], ridge * torch.eye(len(kept))])
        wanted = torch.cat([x @ weight.T, torch.zeros(len(kept), len(weight))])
        solution = torch.linalg.lstsq(rows, wanted.double()).solution.T
        assert (new - solution).abs().max() <= 3e-4 * solution.abs().max()  # G is summed in float32
        assert (x[:, kept] @ new.T - x @ weight.T).norm() < (x[:, kept] @ weight[:, kept].T - x @ weight.T).norm()


@pytest.mark.parametrize("dim", ["ffn", "heads"])
def test_an_output_score_is_the_error_that_is_left_without_the_part(dim: str) -> None:
    """Of a channel with the others as they are, of a head with the others fitted to stand in for it."""
    reader = {"ffn": "model.layers.1.mlp.down_proj", "heads": "model.layers.1.self_attn.o_proj"}[dim]
    model, cut, found = measured("LlamaForCausalLM", {dim: 4 if dim == "heads" else 40}, importance="output")
    x = torch.cat([part.flatten(0, 1) for part in inputs_of(model, [reader])[reader]]).double()
    weight, parts = model.get_submodule(reader).weight.double(), cut.before[dim]
    ridge = (1e-3 * x.square().sum() / x.shape[1]).sqrt()  # of G's mean diagonal
    rows, width = torch.cat([x, ridge * torch.eye(x.shape[1])]), x.shape[1] // parts
    errors = []
    for part in range(parts):
        own = torch.arange(x.shape[1]) // width == part
        if dim == "ffn":
            left = x[:, own] @ weight[:, own].T
        else:
            lost = rows[:, own] @ weight[:, own].T
            left = lost - rows[:, ~own] @ torch.linalg.lstsq(rows[:, ~own], lost).solution
        errors.append(left.norm() / len(x) ** 0.5)
    torch.testing.assert_close(
        torch.from_numpy(found.scores[dim][1, None]).double(), torch.stack(errors), rtol=1e-4, atol=0.0
    )


@pytest.mark.parametrize("family", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_experts_are_scored_by_what_the_router_lets_through(family: str) -> None:
    from modelopt.torch.prune.importance_hooks.base_hooks import L2NormHook

    stacked = family.startswith("GptOss")
    model, _, found = measured(family, {"experts": 4, "moe_ffn": 28}, importance="minitron")
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    calls: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls[name].append([*args, *kwargs.values()]), with_kwargs=True
        )
    with torch.no_grad():
        for batch in prepare(BATCHES, open_source(model)).batches:
            model(**batch)
        for layer, name in enumerate(names):
            experts, norms, channels = model.get_submodule(name), [], []
            inputs: list[list[torch.Tensor]] = [[] for _ in calls[name]]
            for expert in range(5):
                hook, total, tokens = L2NormHook(), 0.0, 0
                for (x, chosen, weights), together in zip(calls[name], inputs, strict=True):
                    slot, token = torch.where((chosen == expert).T)
                    share = weights[token, slot][:, None]
                    if stacked:
                        both = x[token] @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
                        inner = experts._apply_gate(both)
                        out = inner @ experts.down_proj[expert] + experts.down_proj_bias[expert]
                    else:
                        gate, up = (x[token] @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
                        inner = experts.act_fn(gate) * up
                        out = inner @ experts.down_proj[expert].T
                    hook(model, (inner * share,), out)
                    together.append(inner * share)
                    total, tokens = total + (out * share).norm(dim=-1).sum().item(), tokens + len(token)
                norms.append(total / (tokens + 1e-8))
                channels.append(hook.accumulate())
            scores = found.scores["moe_ffn"]
            torch.testing.assert_close(torch.from_numpy(found.scores["experts"][layer, None]), torch.tensor(norms))
            if stacked:  # ModelOpt's grouped experts: one input with the tokens of all
                hook = L2NormHook()
                for together in inputs:
                    hook(model, (torch.cat(together),), together)
                torch.testing.assert_close(torch.from_numpy(scores[layer, None]), hook.accumulate())
            for expert in range(0 if stacked else 5):
                torch.testing.assert_close(torch.from_numpy(scores[layer, expert]), channels[expert])


def test_layers_and_width_are_scored_by_what_they_change() -> None:
    model, _, found = measured("LlamaForCausalLM", {"layers": 1, "hidden": 48}, importance="minitron")
    seen = inputs_of(model, ["model.layers.0", "model.layers.1", "model.norm"])
    for layer, after in enumerate(("model.layers.1", "model.norm")):
        pairs = zip(seen[f"model.layers.{layer}"], seen[after], strict=True)
        influence = sum(1 - torch.cosine_similarity(x, y, dim=2).mean().item() for x, y in pairs)
        assert found.scores["layers"][None, None][layer] == pytest.approx(influence, abs=1e-6)
    total = torch.zeros(60)
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.up_proj"):
            name = f"model.layers.{layer}.{module}"
            parts = [x.abs().mean(dim=1).square().sum(dim=0) for x in inputs_of(model, [name])[name]]
            total += torch.stack(parts).sum(dim=0).sqrt()
    torch.testing.assert_close(torch.from_numpy(found.scores["hidden"][None, None]), total)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_padding_does_not_count(family: str) -> None:
    """Rows of different lengths, padded on the right, score as the same rows one by one."""
    keep = {"moe_ffn": 28, "experts": 4} if family.startswith("Mixtral") else {"ffn": 40, "hidden": 48, "layers": 1}
    rows = [torch.randint(3, 97, (1, length), generator=random) for length in (24, 11, 17)]
    ids = torch.cat([torch.nn.functional.pad(row, (0, 24 - row.shape[1])) for row in rows])
    mask = torch.cat([(torch.arange(24) < row.shape[1]).long()[None] for row in rows])
    source = open_source(build(family, torch.float32))
    cut, structure = plan_cut(source, keep, None), structure_of(source)
    for importance in ("output", "minitron"):
        padded, alone = (
            measure_scores(cut, structure, Data(batches=batches), importance=importance).scores
            for batches in (({"input_ids": ids, "attention_mask": mask},), tuple({"input_ids": row} for row in rows))
        )
        for dim in set(padded) - {"layers"}:  # the influence of a layer is a mean over calls
            if importance == "minitron" and dim == "moe_ffn":
                continue  # a mean over the tokens of a call, too
            for at, scores in padded[dim].items():
                np.testing.assert_allclose(scores, alone[dim][at], rtol=2e-4, atol=1e-6)
