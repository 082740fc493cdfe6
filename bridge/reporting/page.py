"""The report as one HTML page: no script, no font, no image from elsewhere; the same report gives the same page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import show
from bridge.errors import fold_layers
from bridge.plots import Plot, experts_plot, lost, parity_plots, scales_plot, storage_plot, worst

if TYPE_CHECKING:
    from bridge.report import Report

CHANNELS = 8  # of one module's outliers that are named


@dataclass(frozen=True)
class Table:
    """`right`: columns of numbers. A table without rows is not shown, one without a title stands for its section."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """A heading with sentences, plots, tables and a text to copy under it; `folded` tables wait to be opened."""

    id: str
    title: str
    words: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    text: str = ""


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """All that the template shows; nothing in it is HTML."""

    title: str
    line: str
    passed: bool
    verdict: str
    tiles: Sequence[Tile]
    sections: Sequence[Section] = field(default_factory=list)


def render(report: Report) -> str:
    """Fill `templates/report.html.j2`; everything that comes from a model is escaped."""
    import jinja2

    template = Path(__file__).with_name("templates") / "report.html.j2"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(page=page_of(report))


def page_of(report: Report) -> Page:
    """What the page shows of a report."""
    found = [
        _proof(report), _outputs(report), _parity(report), _advice(report), _storage(report), _scales(report),
        _activations(report), _not_done(report), _provenance(report),
    ]  # fmt: skip
    return Page(
        title=Path(report.out).name,
        line=f"Target {report.target}, scheme {report.scheme}: {report.tensors:,} tensors, {report.quantized:,} "
        "quantized.",
        passed=report.passed,
        verdict=show.verdict(report),
        tiles=list(_tiles(report)),
        sections=[section for section in found if section.words or section.tables or section.plots or section.folded],
    )


def _tiles(report: Report) -> Iterator[Tile]:
    ratio = (
        f"{report.bytes / report.source_bytes:.0%} of {show.size(report.source_bytes)}" if report.source_bytes else ""
    )
    yield Tile("Size", show.size(report.bytes), ratio)
    yield Tile("Quantized", f"{report.quantized:,}", f"matrices, of {report.tensors:,} tensors")
    for output in report.parity.outputs[:1] if report.parity else ():
        if output.perplexity is not None and output.reference_perplexity is not None:
            yield Tile("Perplexity", f"{output.perplexity:.2f}", f"{output.reference_perplexity:.2f} in the source")
        yield Tile("Outputs", f"{output.cosine:.4f}", f"cosine over {output.positions:,} positions")
    tensors = report.parity.tensors if report.parity else ()
    if tensors:
        least = worst(tensors)
        yield Tile("Worst weight", lost(least.decibels, least, 1), "dB, signal to noise")
    yield Tile("Time", f"{sum(report.seconds.values()):.1f} s", f"peak memory {show.size(report.peak_memory)}")


def _proof(report: Report) -> Section:
    rows = [(what, n, of, "holds" if n == of else "FAILS") for what, n, of in show.count_rows(report)]
    words = [] if report.parity else ["What was written was not compared with its source."]
    return Section("proved", "Counted", words, tables=[Table("", ("what", "n", "of", "holds"), rows, (1, 2))])


def _outputs(report: Report) -> Section:
    rows = show.output_rows(report.parity) if report.parity else []
    return Section("outputs", "Outputs and perplexity", tables=_shown(
        Table("Outputs of the written file, run on held-out inputs", show.OUTPUTS, rows, range(1, 7))
    ))  # fmt: skip


def _parity(report: Report) -> Section:
    if report.parity is None:
        return Section("parity", "Parity by layer")
    hurt = [(module, f"{damage:.2e}") for module, damage in report.parity.layers]
    return Section(
        "parity",
        "Parity by layer",
        plots=parity_plots(report.parity),
        tables=_shown(
            Table("Weights against the source", show.WEIGHTS, show.weight_rows(report.parity), (1, 3, 4, 5, 6))
        ),
        folded=_shown(Table("Every module's own error", ("module", "relative L2 of its output"), hurt, (1,))),
    )


def _advice(report: Report) -> Section:
    if report.parity is None or not report.quantized:
        return Section("advice", "Recommendation")
    title = "Recommendation"
    if not report.advice:
        return Section("advice", title, ["No layer stands out: none is hurt twice as much as the median one."])
    share, more = sum(a.share for a in report.advice), sum(a.bytes for a in report.advice)
    grown = f" ({more / report.bytes:.1%})" if report.bytes else ""
    measured = "of the modules' own outputs" if report.parity.layers else "of the weights (no output was run)"
    words = [
        f"Left unquantized, these modules are expected to take away {share:.0%} of the summed squares of the error "
        f"{measured}, for {show.size(more)}{grown} more. The most gained per byte stands first.",
        f"This is an estimate from one run; `qbridge sensitivity MODEL --quant {report.scheme}` measures each alone.",
    ]
    rows = [
        (", ".join(fold_layers(a.modules)), f"{a.damage:.2e}", f"{a.share:.1%}", show.size(a.bytes))
        for a in report.advice
    ]
    columns = ("modules", "error", "share of the error", "more bytes")
    return Section("advice", title, words, tables=[Table("", columns, rows, (1, 2, 3))], text=_rule(report))


def _rule(report: Report) -> str:
    """What a recipe says to follow the advice."""
    modules = [f'    "{module}",' for advice in report.advice for module in advice.modules]
    return "\n".join(["[[rule]]", "modules = [", *modules, "]", 'quant = "none"'])


def _storage(report: Report) -> Section:
    rows = [
        (
            row.kind, f"{row.tensors:,}", f"{row.values:,}", row.was, row.now, show.size(row.before),
            show.size(row.codes), show.size(row.scales), _bits(row.codes + row.scales, row.values),
        )
        for row in report.storage
    ]  # fmt: skip
    columns = ("kind", "n", "values", "was", "is", "before", "codes or values", "scales", "bits a value")
    dtypes = [(name, show.size(before), show.size(after)) for name, before, after in report.dtypes]
    plot = storage_plot(report.storage)
    return Section(
        "bytes",
        "Where bits and bytes went",
        plots=[plot] if plot else [],
        tables=_shown(Table("By dtype", ("dtype", "in the source", "written"), dtypes, (1, 2))),
        folded=_shown(Table("By kind of tensor", columns, rows, (1, 2, 5, 6, 7, 8))),
    )


def _bits(nbytes: int, values: int) -> str:
    return f"{nbytes * 8 / values:.2f}" if values else ""


def _scales(report: Report) -> Section:
    ranges = report.parity.scales if report.parity else ()
    plot = scales_plot(ranges)
    rows = [
        (r.kind, f"{r.scales:,}", f"2^{r.low}", f"2^{r.low + len(r.counts)}", _middle(r.counts, r.low)) for r in ranges
    ]
    columns = ("kind", "scales", "from", "to below", "half lie below")
    return Section(
        "scales",
        "Scales",
        plots=[plot] if plot else [],
        folded=_shown(Table("Range of the scales", columns, rows, (1, 2, 3, 4))),
    )


def _middle(counts: Sequence[int], low: int) -> str:
    seen = 0
    for at, count in enumerate(counts):
        seen += count
        if 2 * seen >= sum(counts):
            return f"2^{low + at + 1}"
    return ""


def _activations(report: Report) -> Section:
    rows = [
        (
            row.module, f"{len(row.channels):,} of {row.of:,}", f"{row.largest / row.median:.0f}",
            ", ".join(map(str, row.channels[:CHANNELS])) + (", …" if len(row.channels) > CHANNELS else ""),
        )
        for row in report.outliers
    ]  # fmt: skip
    plot = experts_plot(report.experts)
    unseen = [f"{layer.module}.{expert}" for layer in report.experts for expert in layer.unseen]
    covered = [
        (
            layer.module,
            f"{sum(layer.tokens):,}",
            f"{min(layer.tokens):,}",
            f"{max(layer.tokens):,}",
            str(len(layer.unseen)),
        )
        for layer in report.experts
    ]
    columns = ("input of", "outlier channels", "largest over median", "channels")
    return Section(
        "activations",
        "Activations in calibration",
        words=[f"Experts that no calibration token reached: {', '.join(fold_layers(unseen))}."] if unseen else [],
        plots=[plot] if plot else [],
        tables=_shown(
            Table("Outlier channels: amax ten times the median of the input, or more", columns, rows, (1, 2))
        ),
        folded=_shown(
            Table("Tokens of the experts", ("layer", "tokens", "least", "most", "never seen"), covered, (1, 2, 3, 4))
        ),
    )


def _not_done(report: Report) -> Section:
    reasons = ("n", "why", "what")
    not_run = report.parity.not_run if report.parity else ()
    tables = _shown(
        Table("Findings of lint", ("finding",), [(line,) for line in fold_layers(report.findings)]),
        Table("Not run", ("what, and why",), [(line,) for line in not_run]),
        Table("Policies applied", reasons, show.by_reason(report.policies), (0,)),
        Table("Not carried, quantized or run", reasons, show.by_reason(report.skipped), (0,)),
        Table("Notes", ("note",), [(line,) for line in report.notes]),
    )
    return Section("exceptions", "Exceptions and notes", tables=tables)


def _provenance(report: Report) -> Section:
    made = [("written to", report.out), ("plan", report.plan_digest), *report.made_from.items()]
    tables = _shown(
        Table("Made from", ("what", "value"), made),
        Table("Seconds", ("stage", "seconds"), [(k, f"{v:.2f}") for k, v in report.seconds.items()], (1,)),
        Table("Versions", ("package", "version"), sorted(report.versions.items())),
    )
    return Section("provenance", "Provenance", tables=tables)


def _shown(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]
