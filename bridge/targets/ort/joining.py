"""Plan one matrix for queries, keys and values.

GroupQueryAttention takes them from one product, and each node of a graph costs time for every token. Blocks along `in`
and scales per `out` stack exactly. ONNX Runtime has no Concat of INT4, so the stacked codes are what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bridge.core.values import Site
from bridge.planning.plan import Output, Step
from bridge.planning.target import Draft
from bridge.quant.schemes.scheme import has_tensor_scale

ROLES = ("attn.q.weight", "attn.k.weight", "attn.v.weight")
JOINED = "qkv_proj"


def join_attention(steps: Sequence[Step], draft: Draft) -> list[Step]:
    """The steps with one for the queries, keys and values of each layer, and one for their biases, where they fit."""
    own = {step.source: step for step in steps if step.site is None or step.site.weight == step.source}
    joined: dict[str, Step | None] = {}
    for sites in _attentions(draft):
        weights = [own[site.weight] for site in sites if site.weight in own]
        biases = [own[name] for site in sites if (name := f"{site.module}.bias") in own]
        if not _fit(weights, sites, draft) or len(biases) not in (0, len(sites)):
            continue
        modules = [site.module for site in sites]
        for group in filter(None, (weights, biases)):
            first, *others = group
            joined |= {first.source: _join(group, modules), **{step.source: None for step in others}}
    return [made for step in steps if (made := joined.get(step.source, step))]


def _attentions(draft: Draft) -> Iterator[list[Site]]:
    """The sites of queries, keys and values of every layer that has a matrix for each."""
    layers: dict[int | None, dict[str, Site]] = {}
    for site in draft.structure.sites:
        if len(site.roles) == 1 and site.roles[0] in ROLES:
            layers.setdefault(site.layer, {})[site.roles[0]] = site
    yield from ([found[role] for role in ROLES] for found in layers.values() if len(found) == len(ROLES))


def _fit(weights: Sequence[Step], sites: Sequence[Site], draft: Draft) -> bool:
    """Whether matrices can be one: alike in everything but `out`.

    Those of AWQ are not: each has a pre-scale of its own, which their common input cannot be multiplied by. Nor are
    those under one scale each. Verification knows one gate for a matrix.
    """
    if len(weights) != len(ROLES) or any(site.layout != "out_in" for site in sites):
        return False
    format_, specs = weights[0].format, [draft.specs[site.weight] for site in sites]
    alike = {(step.format, spec.dtype, spec.shape[1:]) for step, spec in zip(weights, specs, strict=True)}
    if len(alike) > 1 or len({site.module.rpartition(".")[0] for site in sites}) > 1:
        return False
    if format_ is None:
        return True
    assert draft.scheme
    gates = {draft.scheme.gate_of(site) for site in sites}
    return len(gates) == 1 and not format_.prescales and not has_tensor_scale(format_)


def _join(steps: Sequence[Step], modules: Sequence[str]) -> Step:
    first = steps[0]
    module = f"{modules[0].rpartition('.')[0]}.{JOINED}"
    inputs = tuple(replace(part, module=own) for step, own in zip(steps, modules, strict=True) for part in step.inputs)
    parts = zip(*(step.outputs for step in steps), strict=True)
    axis = -1 if first.transpose else 0  # `out`, also of the scales
    outputs = tuple(_stacked(same, modules[0], module, axis) for same in parts)
    return replace(first, inputs=inputs, outputs=outputs)


def _stacked(outputs: Sequence[Output], old: str, new: str, axis: int) -> Output:
    first, shape = outputs[0], list(outputs[0].spec.shape)
    shape[axis] = sum(output.spec.shape[axis] for output in outputs)
    name = f"{new}{first.spec.name.removeprefix(old)}"
    text = f"concat({', '.join(output.expression for output in outputs)})"
    return replace(first, spec=replace(first.spec, name=name, shape=tuple(shape)), expression=text)
