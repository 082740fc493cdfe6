"""The report as one HTML page, without scripts, fonts or requests; deterministic."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from bridge.core.addresses import is_remote
from bridge.core.text import fold_layers, size
from bridge.reporting.card_metadata import hub_id
from bridge.reporting.loading import LOADING, loading_rows
from bridge.reporting.plots import Plot, experts_plot, measured, parity_plots, scales_plot, storage_plot, training_plot
from bridge.reporting.report import Report, cost, count_rows, outputs_title, verdict
from bridge.reporting.rows import OUTPUTS, WEIGHTS, by_reason, output_rows, weight_rows, worst
from bridge.sources.live_models.distillation import Distillation
from bridge.targets import load_target
from bridge.verification.parity import Parity

APART = 1.25  # medians of the error, 2 dB; rounding alone spreads the weights of a model by less
MAX_WORST = 5  # layers that the page names first
MAX_CHANNELS = 8  # outlier channels that the page shows per module


@dataclass(frozen=True)
class Table:
    """`right`: columns of numbers. A table without rows is not shown; one without a title has that of its section."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Section:
    """A heading with sentences, links, plots, tables and a text to copy; `folded` tables are closed at first."""

    id: str
    title: str
    words: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    label: str = ""  # of the text
    text: str = ""
    links: Sequence[tuple[str, str]] = ()  # what is read, and where it leads


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The values that the template shows; none is HTML. `judged`: what the verdict is about, "" without a verdict."""

    title: str
    line: str
    passed: bool
    verdict: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    judged: str = "Parity"
    end: str = "Written by qbridge with the model; report.json has the same figures."


def render(report: Report) -> str:
    """The page of a report as HTML."""
    return html_of(page_of(report))


def html_of(page: Page) -> str:
    """Fill `report.html.j2`; every text from a model is escaped."""
    return str(_template().render(page=page))


@cache
def _template() -> Any:
    """Compiled once: that takes 50 ms, as long as writing a tiny model."""
    import jinja2

    template = Path(__file__).with_name("report.html.j2")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = _short
    return environment.from_string(template.read_text(encoding="utf-8"))


def _short(value: float) -> str:
    """A coordinate with one decimal, or none if that is 0."""
    return f"{value:.1f}".removesuffix(".0")


def page_of(report: Report) -> Page:
    """The page of a report; empty sections are left out."""
    sections = [
        _outputs(report), _training(report), _worst(report), _programs(report), _parity(report), _advice(report),
        _inspection(report), _storage(report), _scales(report), _activations(report), _exceptions(report),
        _counted(report), _provenance(report),
    ]  # fmt: skip
    return Page(
        title=Path(report.out).name,
        line=f"{_source(report)}Target {report.target}, scheme {report.scheme}: {report.tensors:,} tensors, "
        f"{report.quantized:,} quantized.",
        passed=report.passed,
        verdict="; cost ".join(filter(None, [verdict(report), cost(report)])),
        tiles=list(_tiles(report)),
        sections=[s for s in sections if s.words or s.tables or s.plots or s.folded or s.text],
    )


def _source(report: Report) -> str:
    """A sentence that names the source; a directory without what lies above it."""
    where = report.made_from.get("source", "")
    name = hub_id(where) or Path(where).name
    return f"Made from {name}. " if name else ""


def _tiles(report: Report) -> Iterator[Tile]:
    for output in report.parity.outputs[:1]:
        if output.perplexity is not None and output.reference_perplexity is not None:
            yield Tile("Perplexity", f"{output.perplexity:.2f}", f"{output.reference_perplexity:.2f} in the source")
        if (found := report.parity.evaluation) is None:
            yield Tile("Outputs", f"{output.cosine:.4f}", f"cosine over {output.positions:,} positions")
            continue
        yield Tile("KL", f"{found.kl:.4f}", f"± {found.kl_error:.4f} nats a token, over {found.tokens:,} tokens")
        yield Tile("Same token", f"{found.agreement:.1%}", "of the positions")
    ratio = f"{report.bytes / report.source_bytes:.0%} of {size(report.source_bytes)}" if report.source_bytes else ""
    yield Tile("Size", size(report.bytes), ratio)
    if report.bits:
        yield Tile("Bits a value", f"{report.bits:.2f}", f"all tensors; {report.quantized:,} quantized")
    if report.parity.tensors:
        tensor = worst(report.parity.tensors)
        yield Tile("Worst weight", measured(tensor.decibels, tensor, 1), "dB, signal to noise")
    yield Tile("Time", f"{sum(report.seconds.values()):.1f} s", f"peak memory {size(report.peak_memory)}")


def _counted(report: Report) -> Section:
    rows = [(what, n, of, "holds" if n == of else "FAILS") for what, n, of in count_rows(report)]
    words = [] if report.compared else ["The output was not compared with its source."]
    return Section("proved", "Counted", words, tables=[Table("", ("what", "n", "of", "holds"), rows, (1, 2))])


def _outputs(report: Report) -> Section:
    title = f"{outputs_title(report.parity).capitalize()}, run on held-out inputs"
    rows = output_rows(report.parity)
    return Section("outputs", "Outputs and perplexity", tables=_shown(Table(title, OUTPUTS, rows, range(1, 7))))


def _worst(report: Report) -> Section:
    """The layers that lost most, by the error of their outputs if they were run, else by their weights.

    None where all lost about the same, so that no layer is worse than the others.
    """
    if not _differ(report.parity):
        return Section("worst", "Worst layers")
    outputs = [(module, f"{error:.2e}") for module, error in report.parity.layers[:MAX_WORST]]
    weights = sorted(report.parity.tensors, key=lambda t: (t.passed, t.sqnr))[:MAX_WORST]
    rows = [(t.name, f"{measured(t.decibels, t, 1)} dB", f"{t.cosine:.6f}") for t in weights]
    by_output = Table("", ("module", "relative L2 error of its output"), outputs, (1,))
    by_weight = Table("", ("weight", "signal to noise", "cosine"), rows, (1, 2))
    return Section("worst", "Worst layers", tables=_shown(by_output if outputs else by_weight))


def _differ(parity: Parity) -> bool:
    """Whether the worst layer stands apart from the median one, or failed."""
    errors = [error for _, error in parity.layers] or [10 ** (-t.decibels / 20) for t in parity.tensors if t.sqnr < 999]
    return any(not t.passed for t in parity.tensors) or (bool(errors) and not max(errors) <= APART * median(errors))


def _programs(report: Report) -> Section:
    """What loads the output, how that is known, and the command."""
    known = [(p.name, p.versions, p.proof.replace("`", "")) for p in load_target(report.target).loaded_by]
    evidence = Table("", ("program", "versions", "how that is known"), known)
    table = Table("", LOADING, loading_rows(report.programs)) if report.programs else evidence
    label = "To use it:" if report.command else ""
    return Section("programs", "What runs it", tables=_shown(table), label=label, text=report.command)


def _parity(report: Report) -> Section:
    errors = [(module, f"{error:.2e}") for module, error in report.parity.layers]
    return Section(
        "parity",
        "Parity by layer",
        plots=parity_plots(report.parity),
        tables=_shown(Table("Weights against the source", WEIGHTS, weight_rows(report.parity), (1, 3, 4, 5, 6))),
        folded=_shown(Table("Output error of every module", ("module", "relative L2 of its output"), errors, (1,))),
    )


def _advice(report: Report) -> Section:
    if not report.compared or not report.quantized:
        return Section("advice", "Recommendation")
    title = "Recommendation"
    if not report.advice:
        return Section("advice", title, ["No layer stands out: none has twice the error of the median layer."])
    share, more = sum(a.share for a in report.advice), sum(a.bytes for a in report.advice)
    growth = f" ({more / report.bytes:.1%})" if report.bytes else ""
    error = "of the modules' own outputs" if report.parity.layers else "of the weights (no output was run)"
    words = [
        f"Leaving these modules unquantized should remove {share:.0%} of the summed squares of the error {error}, for "
        f"{size(more)}{growth} more. The largest gain per byte comes first.",
        f"This is an estimate from one run; `qbridge sensitivity MODEL --quant {report.scheme}` measures each layer.",
    ]
    rows = [
        (", ".join(fold_layers(a.modules)), f"{a.damage:.2e}", f"{a.share:.1%}", size(a.bytes)) for a in report.advice
    ]
    columns = ("modules", "error", "share of the error", "more bytes")
    modules = [f'    "{module}",' for advice in report.advice for module in advice.modules]
    rule = "\n".join(["[[rule]]", "modules = [", *modules, "]", 'quant = "none"'])
    table = Table("", columns, rows, (1, 2, 3))
    return Section("advice", title, words, tables=[table], label="In a recipe:", text=rule)


def _inspection(report: Report) -> Section:
    """Where an inspection of the output is, or the command that makes one."""
    out = report.out if report.inspect.startswith("bridge.") else shlex.quote(report.out)
    command = "" if is_remote(report.out) else report.inspect.replace("{out}", out)
    links = [("The inspection of this output", report.inspected)] if report.inspected else []
    label = "To see where numbers are lost, layer by layer:" if command else ""
    return Section("inspection", "Inspection", label=label, text=command, links=links)


def _storage(report: Report) -> Section:
    rows = [
        (
            row.kind, f"{row.tensors:,}", f"{row.values:,}", row.was, row.now, size(row.before),
            size(row.codes), size(row.scales), f"{(row.codes + row.scales) * 8 / row.values:.2f}" if row.values else "",
        )
        for row in report.storage
    ]  # fmt: skip
    columns = ("kind", "n", "values", "was", "is", "before", "codes or values", "scales", "bits a value")
    dtypes = [(name, size(before), size(after)) for name, before, after in report.dtypes]
    plot = storage_plot(report.storage)
    return Section(
        "bytes",
        "Bytes by kind of tensor",
        plots=[plot] if plot else [],
        tables=_shown(Table("By dtype", ("dtype", "in the source", "written"), dtypes, (1, 2))),
        folded=_shown(Table("By kind of tensor", columns, rows, (1, 2, 5, 6, 7, 8))),
    )


def _training(report: Report) -> Section:
    """What a distillation did; empty without one."""
    title, done = "Training", report.distillation
    if done is None:
        return Section("training", title)
    plot = training_plot(done)
    rows = [(f"{step:,}", f"{kl:.4g}", f"{perplexity:.2f}") for step, kl, perplexity in done.held_out]
    table = Table("On text held out", ("steps", "KL to the teacher", "perplexity"), rows, (0, 1, 2))
    return Section("training", title, _training_words(done), [plot] if plot else [], _shown(table))


def _training_words(done: Distillation) -> list[str]:
    """Sentences on what the plot does not show."""
    through = f" through the codes of {done.scheme}" if done.scheme else ""
    cache = f" Its stored answers take {done.cache_bytes:,} bytes." if done.cache_bytes else ""
    return [
        f"{done.steps:,} steps of {done.tokens // max(done.steps, 1):,} tokens{through}, taught by {done.teacher} "
        f"(perplexity {done.teacher_perplexity:.2f}), which ran {done.teacher_share:.0%} of {done.seconds:.0f} s."
        f"{cache}"
    ]


def _scales(report: Report) -> Section:
    ranges = report.parity.scales
    plot = scales_plot(ranges)
    rows = [
        (r.kind, f"{r.scales:,}", f"2^{r.low}", f"2^{r.low + len(r.counts)}", _median(r.counts, r.low)) for r in ranges
    ]
    columns = ("kind", "scales", "from", "to below", "half lie below")
    return Section(
        "scales",
        "Scales",
        plots=[plot] if plot else [],
        folded=_shown(Table("Range of the scales", columns, rows, (1, 2, 3, 4))),
    )


def _median(counts: Sequence[int], low: int) -> str:
    ends = (power for power, below in enumerate(accumulate(counts), low + 1) if 2 * below >= sum(counts))
    return f"2^{next(ends)}" if counts else ""


def _activations(report: Report) -> Section:
    rows = [
        (
            row.module, f"{len(row.channels):,} of {row.of:,}", f"{row.largest / row.median:.0f}",
            ", ".join(map(str, row.channels[:MAX_CHANNELS])) + (", …" if len(row.channels) > MAX_CHANNELS else ""),
        )
        for row in report.outliers
    ]  # fmt: skip
    plot = experts_plot(report.experts)
    unseen = [f"{layer.module}.{expert}" for layer in report.experts for expert in layer.unseen]
    tokens = [
        (e.module, f"{sum(e.tokens):,}", f"{min(e.tokens):,}", f"{max(e.tokens):,}", str(len(e.unseen)))
        for e in report.experts
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
            Table("Tokens of the experts", ("layer", "tokens", "least", "most", "never seen"), tokens, (1, 2, 3, 4))
        ),
    )


def _exceptions(report: Report) -> Section:
    reasons = ("n", "why", "what")
    tables = _shown(
        Table("Findings of lint", ("finding",), [(line,) for line in fold_layers(report.findings)]),
        Table("Not run", ("what, and why",), [(line,) for line in report.parity.not_run]),
        Table("Policies applied", reasons, by_reason(report.policies), (0,)),
        Table("Not copied, quantized or run", reasons, by_reason(report.skipped), (0,)),
        Table("Notes", ("note",), [(line,) for line in report.notes]),
    )
    return Section("exceptions", "Exceptions and notes", tables=tables)


def _provenance(report: Report) -> Section:
    rows = [("written to", report.out), ("plan", report.plan_digest), *report.made_from.items()]
    tables = _shown(
        Table("Made from", ("what", "value"), rows),
        Table("Seconds", ("stage", "seconds"), [(k, f"{v:.2f}") for k, v in report.seconds.items()], (1,)),
        Table("Versions", ("package", "version"), sorted(report.versions.items())),
    )
    return Section("provenance", "Provenance", tables=tables)


def _shown(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]
