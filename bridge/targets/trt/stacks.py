"""Cut experts that a checkpoint stacks into one matrix each.

The graph reads each by itself.
"""

from __future__ import annotations

from dataclasses import replace

from bridge.core.values import Site, Slice, TensorSpec
from bridge.planning.plan import Step


def experts_of(spec: TensorSpec, site: Site) -> list[tuple[TensorSpec, Site]]:
    """The matrix of each expert, `tensor[3]`, and its site; stored as [out, in] or [in, out], as the stack has it."""
    layout = site.layout.removeprefix("stack_")
    names = [f"{spec.name}[{expert}]" for expert in range(spec.shape[0])]
    return [
        (
            replace(spec, name=name, shape=spec.shape[1:]),
            replace(site, module=f"{site.module}[{expert}]", weight=name, layout=layout, expert=expert),
        )
        for expert, name in enumerate(names)
    ]


def of_expert(step: Step, spec: TensorSpec, site: Site) -> Step:
    """A step of one of them, reading it in the stack; all experts have the statistics of the stack's input."""
    assert step.site
    return replace(step, inputs=(Slice(spec.name, module=site.module, expert=step.site.expert),))
