"""Rows for the tables of a report; repeated layers share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.core.text import _NUMBER, fold, grouped, pattern
from bridge.verification.parity import Parity, TensorParity

WEIGHTS = ("tensor", "n", "scheme", "cosine", "norm ratio", "SQNR dB", "worst block", "worst at", "gate")
OUTPUTS = ("against", "positions", "cosine", "norm", "L2 error", "perplexity", "reference", "gate")  # 80 columns


def by_reason(reasons: Mapping[str, str], every: bool = False) -> list[tuple[str, ...]]:
    """Rows of count, reason and folded names."""
    groups = grouped(list(reasons.items()), lambda item: item[1])
    return [(str(len(g)), g[0][1], name_lines([name for name, _ in g], every)) for g in groups]


def name_lines(names: Sequence[str], every: bool) -> str:
    """Names, one to a line; with `every` not folded."""
    return "\n".join(names if every else (fold(list(g)) for g in grouped(names, pattern)))


def weight_rows(parity: Parity) -> list[tuple[str, ...]]:
    """One row per kind of weight; columns `WEIGHTS`."""
    return [_worst_row(group) for group in grouped(parity.tensors, lambda t: (pattern(t.name), t.scheme))]


def output_rows(parity: Parity) -> list[tuple[str, ...]]:
    """One row per reference; columns `OUTPUTS`."""
    return [
        (
            o.reference, f"{o.positions:,}", f"{o.cosine:.6f}", f"{o.norm_ratio:.4f}", f"{o.relative_l2:.2e}",
            _number(o.perplexity), _number(o.reference_perplexity), _gate(o.passed),
        )
        for o in parity.outputs
    ]  # fmt: skip


def worst(group: Sequence[TensorParity]) -> TensorParity:
    """The tensor that represents a group: one that failed, else the one with the lowest SQNR."""
    return min(group, key=lambda t: (t.passed, t.sqnr))


def _worst_row(group: Sequence[TensorParity]) -> tuple[str, ...]:
    """One row for a kind of tensor, with the numbers of its worst member."""
    tensor = worst(group)
    at = ".".join(_NUMBER.findall(tensor.name)) if len(group) > 1 else ""
    passed = all(t.passed for t in group)
    return (
        fold([t.name for t in group]), str(len(group)), tensor.scheme, f"{tensor.cosine:.6f}",
        f"{tensor.norm_ratio:.4f}", f"{tensor.sqnr:.1f}", f"{tensor.worst:.2e}", at, _gate(passed),
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _gate(passed: bool) -> str:
    return "passed" if passed else "FAILED"
