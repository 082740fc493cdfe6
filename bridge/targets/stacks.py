"""Cut experts that a checkpoint stacks into matrices of their own.

Their names are those of checkpoints with a module an expert, which llm-compressor and ModelOpt write for such models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridge.core.values import Site, Slice, TensorSpec
from bridge.planning.plan import Step

HALVES, PAIRS = "halves", "pairs"  # see `Structure.joined`
# End of a stack's name -> the projections of an expert in it. vLLM reads no others: of JetMoE it has no model.
PROJECTIONS = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
    "block_sparse_moe.output_linear.weight": ("down_proj",),
}


@dataclass(frozen=True)
class Matrix:
    """A matrix of an expert: its spec and its site, as if it were a tensor; and the part of the stack that it is."""

    spec: TensorSpec
    site: Site
    slice: Slice

    def reading(self, step: Step) -> Step:
        """A step of the matrix, reading it in the stack; all experts have the statistics of the stack's input."""
        return replace(step, inputs=(self.slice,))


def experts_of(spec: TensorSpec, site: Site) -> list[Matrix]:
    """The matrix of each expert, `tensor[3]`, stored as [out, in] or [in, out], as the stack has it."""
    layout = site.layout.removeprefix("stack_")
    matrices = []
    for expert in range(spec.shape[0]):
        name = f"{spec.name}[{expert}]"
        own = replace(site, module=f"{site.module}[{expert}]", weight=name, layout=layout, expert=expert)
        part = Slice(spec.name, module=site.module, expert=expert)
        matrices.append(Matrix(replace(spec, name=name, shape=spec.shape[1:]), own, part))
    return matrices


def modules_of(spec: TensorSpec, site: Site, joined: str) -> list[Matrix]:
    """The projections of each expert as modules [out, in], `experts.3.gate_proj`; none if the stack has no such names.

    joined: how gate and up are one matrix of the stack, see `Structure.joined`.
    """
    block, projections = container(spec.name)
    turned = site.layout == "stack_in_out"
    out, in_ = (spec.shape[-1], spec.shape[-2]) if turned else (spec.shape[-2], spec.shape[-1])
    count = len(projections)
    if joined != (HALVES if count > 1 else "") or out % max(count, 1):
        return []
    matrices = []
    for expert in range(spec.shape[0]):
        for at, projection in enumerate(projections):
            module = f"{block}.{expert}.{projection}"
            name = f"{spec.name}[{expert}, {projection}]" if count > 1 else f"{spec.name}[{expert}]"
            shares = f"{spec.name}[{expert}]" if count > 1 else ""
            own = replace(site, module=module, weight=name, layout="out_in", expert=expert, shares=shares)
            ends = (at * out // count, (at + 1) * out // count) if count > 1 else None
            rows, cols = (None, ends) if turned else (ends, None)
            part = Slice(spec.name, rows, cols, site.module, turned, expert=expert)
            matrices.append(Matrix(replace(spec, name=name, shape=(out // count, in_)), own, part))
    return matrices


def container(stack: str) -> tuple[str, tuple[str, ...]]:
    """The module that holds the experts of a stack, and their projections in it; none if its name is not known."""
    for end, projections in PROJECTIONS.items():
        if stack.endswith(f".{end}"):
            block = stack.removesuffix(".weight").rpartition(".")[0]
            return f"{block.removesuffix('.experts')}.experts", projections
    return "", ()


def listed_as(site: Site) -> tuple[str, ...]:
    """The names of a site in lists of unquantized modules: of a stack the module that holds the experts, for runtimes.

    The first is that of the file; the others are what programs ask for instead.
    """
    if not site.stacked:
        return (site.module, *site.asked)
    return (container(site.weight)[0] or site.module, *(container(name)[0] or name for name in site.asked))
