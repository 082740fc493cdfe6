"""The model card: a section of README.md with the report's figures.

Metadata for the hub stand on top of it. It holds no path, no time and no free memory, so that equal runs write equal
bytes. The source's own card stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core.output.names import CARD
from bridge.core.output.temporary import write_whole
from bridge.core.text import fold_layers, size
from bridge.core.version import __version__
from bridge.reporting.card_metadata import hub_id, metadata, with_metadata
from bridge.reporting.report import Report, cost, count_rows, verdict
from bridge.reporting.rows import OUTPUTS, WEIGHTS, by_reason, output_rows, weight_rows

if TYPE_CHECKING:
    from bridge.targets.trt.record import Engines

BEGIN, END = "<!-- qbridge: quantization -->", "<!-- /qbridge -->"
ENGINES = "<!-- qbridge: engines -->"
FACTS = ("architecture", "scheme", "calibration", "calibration data")  # the part of the provenance without paths


def add_section(directory: Path, report: Report) -> None:
    """Write the section into the README.md of a written model, and the metadata on top of it.

    The section, under the name of the model, replaces an earlier one, else it is appended.
    """
    path = directory / CARD
    before = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    name = name_of(report)
    card = with_metadata(with_section(before, f"# {name}\n\n{section(report, name)}"), metadata(report))
    write_whole(path, card.encode("utf-8", "surrogateescape"))


def name_of(report: Report) -> str:
    """The name that `convert` gives an output; the caller's path is not in it, so that cards are equal everywhere."""
    where = report.made_from.get("source", "model")
    source = Path(hub_id(where) or where).name.partition("@")[0]
    return "-".join([source.replace(" ", "-"), report.scheme.replace(":", "-"), report.target])


def add_engines(directory: Path, engines: Engines) -> None:
    """Write the section of engines into the README.md of a written model, in the same way."""
    rows = [
        (one.file, f"{one.product} {one.version}", ", ".join(one.architectures), size(one.bytes), one.summary)
        for one in engines.engines
    ]
    _write(directory / CARD, "## Engines\n\n" + _table(("file", "built by", "for", "size", "compiled"), rows), ENGINES)


def _write(path: Path, text: str, mark: str) -> None:
    before = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    write_whole(path, with_section(before, text, mark).encode("utf-8", "surrogateescape"))


def with_section(card: str, text: str, mark: str = BEGIN) -> str:
    """`card` with `text` between its marks; if it has none, they are appended and every character stays."""
    head, begin, rest = card.rpartition(mark)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        head, tail = f"{card.rstrip()}\n\n" if card.strip() else "", "\n"
    return f"{head}{mark}\n{text}\n{END}{tail}"


def section(report: Report, name: str = "") -> str:
    """The report's figures as Markdown; with a name also the command that serves the model."""
    ratio = f" ({report.bytes / report.source_bytes:.0%})" if report.source_bytes else ""
    parts = [
        "## Quantization",
        f"Scheme `{report.scheme}` for target `{report.target}`, made by qbridge {__version__}: {report.tensors:,} "
        f"tensors, {report.quantized:,} of them quantized matrices; {size(report.source_bytes)} became "
        f"{size(report.bytes)}{ratio}. Parity with the source: {_cell(verdict(report))}.",
        *_measured(report),
        *(
            [f"To use it:\n\n```sh\n{report.next.replace('{out}', name)}\n```"]
            if name and report.next and report.passed
            else []
        ),
        _table(("counted", "n", "of"), count_rows(report), (1, 2)),
    ]
    parts.append(_table(WEIGHTS, weight_rows(report.parity), range(3, 7)))
    parts.append(_table(OUTPUTS, output_rows(report.parity), range(1, 7)))
    parts.append(_table(("n", "why", "not quantized, copied or run"), by_reason(report.skipped), (0,)))
    parts.append(_table(("n", "policy", "tensors"), by_reason(report.policies), (0,)))
    unseen = [f"{layer.module}.{expert}" for layer in report.experts for expert in layer.unseen]
    if unseen:
        parts.append(f"Experts that no calibration token reached: {_code(', '.join(fold_layers(unseen)))}.")
    made = [("plan", report.plan_digest)]
    made += [(name, report.made_from[name]) for name in FACTS if name in report.made_from]
    parts.append(_table(("made from", ""), made))
    return "\n\n".join(part for part in parts if part)


def _measured(report: Report) -> list[str]:
    """A sentence on the outputs, with the tokens that were measured; none without outputs."""
    if told := cost(report):
        return [f"Cost: {_cell(told)}."]
    if not report.parity.outputs:
        return []
    first = report.parity.outputs[0]
    on = f"{first.positions:,} tokens of text that no calibration saw"
    said = f"Measured on {on}: cosine of the outputs {first.cosine:.4f}"
    if first.perplexity is not None and first.reference_perplexity is not None:
        said += f", perplexity {first.perplexity:.2f}, and {first.reference_perplexity:.2f} of the source"
    return [f"{said}."]


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> str:
    if not rows:
        return ""
    rule = ["---:" if i in right else "---" for i in range(len(columns))]
    lines = [columns, rule, *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """A table cell. Names may hold any character: what Markdown or HTML would read becomes code, `|` is escaped."""
    plain = text.replace("\n", ", ")
    return _code(plain) if any(sign in plain for sign in "<>*_{}[]|`&") else plain


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")
