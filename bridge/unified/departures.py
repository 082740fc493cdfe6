"""Where a written checkpoint departs on purpose from what ModelOpt would have written, in sentences for the report."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.errors import fold_layers
from bridge.planning import Plan
from bridge.unified.config import untied_head


def departures(plan: Plan) -> tuple[str, ...]:
    """What a user who knows ModelOpt's files would not expect in these."""
    return tuple(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    if untied_head(plan):
        yield "the head is quantized and so no longer tied to the embedding: config.json says tie_word_embeddings false"
    beside = [
        step.site.module
        for step in plan.quantized
        if step.site and step.format and step.format.algorithm == "awq" and len(step.unified) > 1
        if any(output.part == "pre_quant_scale" for output in step.outputs)
    ]
    if beside:
        yield (
            f"{', '.join(fold_layers(beside))}: pre_quant_scale stays beside the weights, since no norm's output is "
            "read by them alone"
        )
    kept = [step.site.module for step in plan.steps if step.site and not step.format and step.site.layout == "in_out"]
    if kept and plan.quantized:
        yield f"{', '.join(fold_layers(kept))}: Conv1D weights that are not quantized stay [in, out]"
