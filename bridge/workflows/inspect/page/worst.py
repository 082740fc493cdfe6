"""The worst tensors, and why."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.reporting.page import Section, Table
from bridge.workflows.inspect.page.schemes import scheme_of, statistics_of, worst_of
from bridge.workflows.inspect.result import Inspection, Record, is_bad

SHOWN = 20
OUTLIERS = 20.0  # amax over the 99.9th percentile: with 7 bits, most values then fall on few codes
COLUMNS = ("layer", "role", "tensor", "scheme", "dB", "why")


def worst(inspection: Inspection) -> Section:
    """The layers and tensors with the lowest signal to noise under each scheme."""
    rows = [
        (
            record.layer, record.role, record.tensor, scheme_of(inspection, record),
            "not finite" if record.value is None else f"{record.value:.1f}", "; ".join(_reasons(inspection, record)),
        )
        for record in worst_of(inspection, SHOWN)
    ]  # fmt: skip
    return Section("worst", "Worst tensors", tables=[Table("", COLUMNS, rows, (4,))] if rows else [])


def _reasons(inspection: Inspection, record: Record) -> Iterator[str]:
    """What the other statistics of the same tensor say."""
    place = record.step, record.layer, record.tensor
    if record.value is None or any(
        is_bad(other) for other in inspection.records if (other.step, other.layer, other.tensor) == place
    ):
        yield "NaN or infinity"
    own = statistics_of(inspection, *place)
    if (ratio := own.get("outlier_ratio", 0.0)) > OUTLIERS:
        yield f"outliers: amax {ratio:.0f} x p99.9"
    for stat, what in (("underflows%", "become zero"), ("overflows%", "cut off")):
        value = own.get(record.stat.removesuffix("sqnr") + stat, 0.0)
        if value > 1:
            yield f"{value:.1f} % {what}"
