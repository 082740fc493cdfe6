"""Whether ranks that cut matrices (tensor parallelism) get whole heads and blocks."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.planning.plan import Plan, Step


def uneven(plan: Plan, ranks: int) -> Iterator[str]:
    """What of the model does not divide by a number of ranks."""
    for cut in plan.cuts.values():
        if cut.share(ranks) == 0:
            yield f"{cut.count} {cut.unit} are not shared evenly by {ranks} ranks"


def cut_blocks(plan: Plan, step: Step, ranks: int, out: int, inner: int) -> Iterator[str]:
    """Why ranks cannot share a quantized matrix of which each has a multiple of `out` rows, or of `inner` columns."""
    format_ = step.scheme_format
    assert step.site and format_
    block = format_.weight[0].block
    tile = block[0] if len(block) > 1 else 1
    for role in step.site.roles:
        cut = plan.cuts.get(role)
        if cut is None or not (share := cut.share(ranks)):
            continue
        multiples = (out, tile) if cut.axis == "out" else (inner, *block[-1:])
        if lacking := next((multiple for multiple in multiples if share % multiple), 0):
            yield f"{cut.axis} = {share} a rank of {ranks} is not a multiple of {lacking}"


def numbers_of_ranks(plan: Plan) -> Iterator[int]:
    """Powers of two that the model divides by, from 2."""
    ranks = 2
    while plan.cuts and not any(uneven(plan, ranks)):
        yield ranks
        ranks *= 2
