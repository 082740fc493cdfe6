"""Records of a page by scheme."""

from __future__ import annotations

from bridge.workflows.inspect.result import Inspection, Record, badness

NOISE = (
    "Statistics show where numbers are lost, not what that costs: over the layers of a model, signal to noise and the "
    "measured cost correlated by 0.75 (int8_sq), 0.54 (fp8) and -0.23 (int4_wo), by rank. qbridge sensitivity measures "
    "the cost."
)


def losses_by_scheme(inspection: Inspection) -> dict[str, list[Record]]:
    """The SQNRs by scheme and tensor, each the worst of all steps."""
    found: dict[str, dict[str, Record]] = {}
    for record in inspection.records:
        if record.stat.endswith("sqnr") and record.tensor in ("activation", "weight"):
            name = f"{scheme_of(inspection, record)} {record.tensor}".strip()
            layers = found.setdefault(name, {})
            if record.layer not in layers or badness(record, True) > badness(layers[record.layer], True):
                layers[record.layer] = record
    return {name: list(records.values()) for name, records in found.items()}


def scheme_of(inspection: Inspection, record: Record) -> str:
    """The scheme of an SQNR: that of the session if it names none."""
    return record.stat.removesuffix("sqnr").rstrip("_") or inspection.about.get("scheme", "")


def worst_of(inspection: Inspection, n: int) -> list[Record]:
    """The worst SQNRs, `n` in all: as many of each scheme, one scheme after the other, the worst first."""
    by_scheme: dict[str, list[Record]] = {}
    for records in losses_by_scheme(inspection).values():
        by_scheme.setdefault(scheme_of(inspection, records[0]), []).extend(records)
    found: list[Record] = []
    for records in by_scheme.values():
        records.sort(key=lambda record: (-badness(record, True), record.layer, record.tensor))
        found += records[: max(1, n // len(by_scheme))]
    return found


def statistics_of(inspection: Inspection, step: int, layer: str, tensor: str) -> dict[str, float]:
    """The finite statistics of one tensor at a step, by name."""
    return {
        record.stat: record.value
        for record in inspection.records
        if (record.step, record.layer, record.tensor) == (step, layer, tensor) and record.value is not None
    }
