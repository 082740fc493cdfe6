"""The model card: one marked section of the output's README.md, with the facts of the report.

It must carry no path, no time and no free memory: equal runs write equal bytes. What the source's card says stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import __version__, show
from bridge.errors import fold_layers

if TYPE_CHECKING:
    from bridge.report import Report

CARD = "README.md"
BEGIN, END = "<!-- qbridge: quantization -->", "<!-- /qbridge -->"
FACTS = ("architecture", "scheme", "calibration", "calibration data")  # of the provenance: what is no path


def add_section(directory: Path, report: Report) -> None:
    """Write the section into the README.md of a written model: in the place of an earlier one, else at its end."""
    path = directory / CARD
    before = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    path.write_bytes(with_section(before, section(report)).encode("utf-8", "surrogateescape"))


def with_section(card: str, text: str) -> str:
    """`card` with `text` between its marks; a card without marks keeps every character and gets them at its end."""
    head, begin, rest = card.rpartition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        head, tail = f"{card.rstrip()}\n\n" if card.strip() else "", "\n"
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def section(report: Report) -> str:
    """The facts of a report as Markdown."""
    ratio = f" ({report.bytes / report.source_bytes:.0%})" if report.source_bytes else ""
    parts = [
        "## Quantization",
        f"Scheme `{report.scheme}` for target `{report.target}`, made by qbridge {__version__}: {report.tensors:,} "
        f"tensors, {report.quantized:,} of them quantized matrices; {show.size(report.source_bytes)} became "
        f"{show.size(report.bytes)}{ratio}. Parity with the source: {_cell(show.verdict(report))}.",
        _table(("counted", "n", "of"), show.count_rows(report), (1, 2)),
    ]
    if report.parity:
        parts.append(_table(show.WEIGHTS, show.weight_rows(report.parity), range(3, 7)))
        parts.append(_table(show.OUTPUTS, show.output_rows(report.parity), range(1, 7)))
    parts.append(_table(("n", "why", "not quantized, carried or run"), show.by_reason(report.skipped), (0,)))
    parts.append(_table(("n", "policy", "tensors"), show.by_reason(report.policies), (0,)))
    unseen = [f"{layer.module}.{expert}" for layer in report.experts for expert in layer.unseen]
    if unseen:
        parts.append(f"Experts that no calibration token reached: {_code(', '.join(fold_layers(unseen)))}.")
    made = [("plan", report.plan_digest)]
    made += [(name, report.made_from[name]) for name in FACTS if name in report.made_from]
    parts.append(_table(("made from", ""), made))
    return "\n\n".join(part for part in parts if part)


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> str:
    if not rows:
        return ""
    rule = ["---:" if at in right else "---" for at in range(len(columns))]
    lines = [columns, rule, *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Names may hold anything: what Markdown or HTML would read is code, and a table's own sign is escaped."""
    plain = text.replace("\n", ", ")
    return _code(plain) if any(sign in plain for sign in "<>*_{}[]|`&") else plain


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")
