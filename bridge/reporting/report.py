"""The report: what was written, its parity, what was skipped and why.

Computes nothing: the figures come from `bridge.reporting.summary` and `bridge.verification`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, cast

from bridge.core.addresses import is_remote
from bridge.core.display import Displayed, Table
from bridge.core.output.names import ENGINES
from bridge.core.text import first_of, fold, fold_layers, grouped, number, pattern, size
from bridge.planning.drafts import is_note
from bridge.reporting.columns import line, titled_table
from bridge.reporting.loading import LOADING, Loading, loading_line, loading_rows
from bridge.reporting.rows import OUTPUTS, WEIGHTS, by_reason, output_rows, weight_rows
from bridge.sources.live_models.distillation import Distillation
from bridge.sources.pruned.summary import Pruning
from bridge.verification.parity import (
    NO_MODEL,
    OUTPUTS_ASIDE,
    Count,
    Evaluation,
    OutputParity,
    Parity,
    ScaleRange,
    TensorParity,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

RUINED = 10.0  # times the perplexity of its source, above which a pruned or trained model is not fit to serve
COST = "cost"  # what failed, of the second verdict
SHOWN_SECONDS = 0.05  # of a stage; below, its figure would be 0.0
TAKEN = re.compile(r"\w+:best took [^;]*")  # of a note: the rule and its figures
MAX_MODULES = 10  # with the largest output error, that the terminal shows


@dataclass(frozen=True)
class Storage:
    """Bytes of one kind of tensor: `before` in the source, now in `codes` (or values) and `scales`."""

    kind: str
    tensors: int
    values: int
    was: str
    now: str
    before: int
    codes: int
    scales: int


@dataclass(frozen=True)
class Outliers:
    """Input channels of one module whose amax is far above the median of all its channels, largest first."""

    module: str
    median: float
    largest: float
    channels: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Coverage:
    """How many calibration tokens each expert of one layer got; `unseen` experts got none."""

    module: str
    tokens: tuple[int, ...]

    @property
    def unseen(self) -> tuple[int, ...]:
        return tuple(expert for expert, count in enumerate(self.tokens) if not count)


@dataclass(frozen=True)
class Advice:
    """Modules to leave unquantized together, since runtimes fuse them, with the expected gain and cost.

    `damage` is the relative L2 error of their outputs; `share` is their part of the summed squares of all damage;
    `bytes` is how much the model grows.
    """

    modules: tuple[str, ...]
    damage: float
    share: float
    bytes: int


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """What `convert` and `verify` return. `seconds` by stage, `bytes` that the runtime loads, `peak_memory` (RSS).

    `skipped` maps names to the reason why they were not copied, quantized or run; `policies` maps tensors to the policy
    that replaced a zero, non-finite or never-seen amax. `made_from` is the provenance; `dtypes` has (dtype, bytes in
    the source, bytes written). `parity` is empty if nothing was compared. `programs`: which of them load the output.
    `next`: a command that uses the output, which lies at `{out}`, and what it `lacks`; `inspect`: one that inspects it;
    `inspected`: its page, if it was run, from the output's directory. `pruning`, `distillation`: what came before, or
    None.

    >>> import json, bridge
    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "reported")
    >>> min(tensor.cosine for tensor in report.parity.tensors) > 0.9999
    True
    >>> json.loads(report.to_json())["bytes"] == report.bytes
    True
    """

    out: str
    plan_digest: str
    target: str
    scheme: str
    tensors: int
    quantized: int
    bytes: int
    source_bytes: int
    seconds: dict[str, float]
    peak_memory: int
    parity: Parity = field(default_factory=Parity)
    skipped: dict[str, str] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    made_from: dict[str, str] = field(default_factory=dict)
    counts: tuple[Count, ...] = ()
    storage: tuple[Storage, ...] = ()
    dtypes: tuple[tuple[str, int, int], ...] = ()
    outliers: tuple[Outliers, ...] = ()
    experts: tuple[Coverage, ...] = ()
    advice: tuple[Advice, ...] = ()
    programs: tuple[Loading, ...] = ()
    next: str = ""
    lacks: str = ""
    inspect: str = ""
    inspected: str = ""
    pruning: Pruning | None = None
    distillation: Distillation | None = None

    @property
    def command(self) -> str:
        """The command that uses the output where it was written; "" if there is none, or a gate failed."""
        out = self.out.removeprefix("hf://") if self.target == "hf" else self.out  # servers take the name at the hub
        return self.next.replace("{out}", shlex.quote(out)) if self.passed and not is_remote(out) else ""

    @property
    def compared(self) -> bool:
        """Whether the output was compared with its source."""
        return self.parity != Parity()

    @property
    def bits(self) -> float:
        """Bits a value of what was written, codes and scales, on average; 0 if nothing was counted."""
        values = sum(row.values for row in self.storage)
        return 8 * sum(row.codes + row.scales for row in self.storage) / values if values else 0.0

    @property
    def invariants(self) -> tuple[Count, ...]:
        """The counts of the plan, and of the verification if there was one."""
        return self.counts + self.parity.counts

    @property
    def passed(self) -> bool:
        """False when a parity gate failed or lint found an error; the command then exits with 3."""
        broken = any(finding.startswith("error") for finding in self.findings)
        return not broken and self.parity.passed and not self.ruined

    @property
    def faithful(self) -> bool:
        """Whether the file is what its scheme computes, whatever that costs."""
        return not any(finding.startswith("error") for finding in self.findings) and self.parity.faithful

    @property
    def change(self) -> tuple[float, float] | None:
        """Perplexity of the source, or teacher, and of the model that was pruned or trained; None without figures."""
        if self.distillation and self.distillation.held_out:
            return self.distillation.teacher_perplexity, self.distillation.held_out[-1][2]
        if self.pruning and self.pruning.perplexity:
            return self.pruning.perplexity[0], self.pruning.perplexity[1]
        return None

    @property
    def ruined(self) -> str:
        """Why a model that was pruned or trained is not fit to serve; "" if it is."""
        before, after = self.change or (0.0, 0.0)
        if not before or after <= RUINED * before:
            return ""
        return (
            f"perplexity is {after / before:,.0f} times the source's, more than {RUINED:g}; train it: qbridge distill"
        )

    @property
    def verdicts(self) -> dict[str, str]:
        """`file`: whether it is what the scheme computes. `cost`: whether that is what the scheme may cost."""
        found, words = self.parity.evaluation, {True: "passed", False: "failed"}
        costs = words[not self.ruined and (found is None or found.passed)]
        measured = self.change or (found and found.bound)
        return {
            "file": words[self.faithful] if self.compared or self.findings else "not compared",
            "cost": costs if measured else "not measured",
        }

    def to_json(self) -> str:
        """The report as JSON with `indent=2`, without NaN."""
        data = {**dataclasses.asdict(self), "passed": self.passed, "verdicts": self.verdicts}
        return json.dumps(data, indent=2, allow_nan=False, default=str)

    def lines(self) -> list[str]:
        return [text.plain for text in report_lines(self)]

    def table(self) -> Table:
        """Its weights, one row per kind."""
        return WEIGHTS, weight_rows(self.parity)

    def __rich__(self) -> Any:
        return report_table(self)


_ROWS = {
    "counts": Count,
    "storage": Storage,
    "outliers": Outliers,
    "experts": Coverage,
    "advice": Advice,
    "programs": Loading,
}
_PARITY_ROWS = {"tensors": TensorParity, "outputs": OutputParity, "counts": Count, "scales": ScaleRange}


def report_from_dict(data: Mapping[str, Any]) -> Report:
    """The inverse of `Report.to_json`."""
    parity = _rebuilt(Parity, data["parity"] or {}, _PARITY_ROWS)
    if found := (data["parity"] or {}).get("evaluation"):
        parity = dataclasses.replace(parity, evaluation=Evaluation(**found))
    values = {key: value for key, value in data.items() if key not in ("passed", "verdicts")}
    for key, kind in (("pruning", Pruning), ("distillation", Distillation)):
        if values.get(key):
            values[key] = kind(**_tuples(values[key]))
    return cast(Report, _rebuilt(Report, {**values, "parity": parity}, _ROWS))


def _rebuilt(kind: Any, data: Mapping[str, Any], rows: Mapping[str, Any]) -> Any:
    """A value of `kind` from its JSON, with the class of each of its `rows`."""
    values = _tuples(data)
    known = {key: row for key, row in rows.items() if key in values}
    return kind(**values | {key: tuple(row(**entry) for entry in values[key]) for key, row in known.items()})


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


def report_lines(report: Report) -> list[Text]:
    """What `convert` prints: what was made, its size, its seconds, its parity, where it is, and what to do next."""
    ratio = f" ({report.bytes / report.source_bytes:.0%})" if report.source_bytes else ""
    bits = f", {report.bits:.2f} bits a value" if report.bits else ""
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in report.seconds.items() if value >= SHOWN_SECONDS)
    seconds = f"{sum(report.seconds.values()):.1f}" + (f" ({stages})" if stages else "")
    counts = f"{report.tensors:,} tensors, {report.quantized:,} quantized"
    changed = f"; perplexity {report.change[0]:,.2f} -> {report.change[1]:,.2f}" if report.change else ""
    lines = [
        line(
            "model",
            f"{report.made_from.get('architecture', '?')} to {report.target}, {report.scheme}: {counts}{changed}",
        ),
        *([line("pruned", report.pruning.line())] if report.pruning else []),
        *([line("trained", report.distillation.line())] if report.distillation else []),
        line("size", f"{size(report.source_bytes)} -> {size(report.bytes)}{ratio}{bits}"),
        line("seconds", f"{seconds}; peak memory {size(report.peak_memory)}"),
        *(line("rule", found[0]) for note in report.notes if (found := TAKEN.match(note))),
        line("parity", verdict(report) + _figures(report.parity)),
        *([line("cost", cost(report))] if cost(report) else []),
        *([line("run in", report.parity.ran)] if report.parity.ran else []),
        line("written", report.out),
        *(line("drafts", note) for note in report.notes if is_note(note)),
        *(line("engine", note) for note in report.notes if fnmatch(note.partition(": ")[0], ENGINES[0])),
    ]
    loads = loading_line(report.programs) if report.passed else ""  # what failed is not for any program
    command = report.command + f"  # {report.lacks}" * bool(report.lacks and report.command)
    return lines + [line(name, text) for name, text in (("loads in", loads), ("next", command)) if text]


def report_table(report: Report, verbose: bool = True) -> RenderableType:
    """The report for the terminal: `report_lines`, after the tables of what failed, or (`verbose`) of everything."""
    from rich.console import Group

    parts: list[RenderableType] = []
    if verbose:
        parts += _everything(report)
    elif not report.passed:
        parts += titled_table("failed", ("what", "n", "why"), failures(report), right=(1,))
    return Group(*parts, *([""] if parts else []), *report_lines(report))


def _everything(report: Report) -> Iterator[RenderableType]:
    parity = report.parity
    title = "weights, re-read and dequantized, against the source"
    yield from titled_table(title, WEIGHTS, weight_rows(parity), right=(1, 3, 4, 5, 6))
    yield from titled_table(outputs_title(parity), OUTPUTS, output_rows(parity), right=(1, 2, 3, 4, 5, 6))
    rows = [(module, f"{error:.2e}") for module, error in parity.layers[:MAX_MODULES]]
    title = "modules with the largest output error"
    yield from titled_table(title, ("module", "relative L2 of its output"), rows, right=(1,))
    yield from titled_table("failed", ("what", "n", "why"), failures(report), right=(1,))
    yield from titled_table("loaded by", LOADING, loading_rows(report.programs))
    yield from titled_table("not run", ("what, and why",), [(text,) for text in parity.not_run])
    yield from titled_table("counted", ("what", "n", "of"), count_rows(report), right=(1, 2))
    yield from titled_table("policies", ("n", "policy", "tensors"), by_reason(report.policies), right=(0,))
    skipped = by_reason(report.skipped)
    yield from titled_table("not copied, quantized or run", ("n", "why", "what"), skipped, right=(0,))
    yield from titled_table("findings of lint", ("finding",), [(text,) for text in fold_layers(report.findings)])
    yield from titled_table("notes", ("note",), [(text,) for text in report.notes])


def outputs_title(parity: Parity) -> str:
    """The heading of the table of outputs: what was run for it."""
    return "outputs of a float32 copy, not of the file itself" if parity.substitute else "outputs of the written file"


def failures(report: Report) -> list[tuple[str, str, str]]:
    """(what, n, why) of each gate that failed and of each error of lint; layers are folded."""
    rows = [
        (what, str(len(group)), group[0].why)
        for group in grouped((t for t in report.parity.tensors if not t.passed), lambda t: (pattern(t.name), t.why))
        for what in [fold([t.name for t in group])]
    ]
    rows += [(f"outputs against {o.reference}", "", o.why) for o in report.parity.outputs if not o.passed]
    rows += [(COST, "", why) for why in _costs(report)]
    errors = [finding for finding in report.findings if finding.startswith("error")]
    return rows + [("lint", "", text) for text in fold_layers(errors)]


def verdict(report: Report) -> str:
    """One line on parity: passed, failed and where, broken by lint errors, or not compared."""
    broken = sum(finding.startswith("error") for finding in report.findings)
    if broken:
        return f"BROKEN: {number(broken, 'error')} of lint"
    if failed := [f"{what}: {why}" for what, _, why in failures(report) if what != COST]:
        return f"FAILED: {first_of(failed, 2)}"
    if not report.compared:
        return "not compared"
    known = (text for text in report.parity.not_run if text.startswith(OUTPUTS_ASIDE) and NO_MODEL not in text)
    how = "qbridge verify" if report.pruning or report.distillation else "--evaluate 2k"
    why = next(known, f"outputs were not run ({how} runs them)")
    return "passed" if report.parity.outputs else f"passed for every weight; {why}"


def cost(report: Report) -> str:
    """One line on what the scheme, or the pruning, costs; "" if that was not measured."""
    found = report.parity.evaluation
    figures = f"{found.line()}{f' ({found.computed})' if found.computed else ''}" if found else ""
    if failed := _costs(report):
        return "; ".join(filter(None, [f"FAILED: {first_of(failed, 2)}", figures]))
    return f"passed: {figures}" if found and found.bound else figures


def _costs(report: Report) -> list[str]:
    """Why the model costs more than it may."""
    found = report.parity.evaluation
    return [*([report.ruined] if report.ruined else []), *([found.why] if found and not found.passed else [])]


def _figures(parity: Parity) -> str:
    """The outputs' cosine and perplexities beside those of the source, if the output was run and not evaluated."""
    if not parity.outputs or parity.evaluation:
        return ""
    first = parity.outputs[0]
    copy = f" (run in float32: {parity.substitute})" if parity.substitute else ""
    figures = f"; output similarity {first.cosine:.4f}{copy}"
    if first.perplexity is not None and first.reference_perplexity is not None:
        figures += f", perplexity {first.reference_perplexity:.2f} -> {first.perplexity:.2f}"
    return figures


def count_rows(report: Report) -> list[tuple[str, ...]]:
    return [(count.what, f"{count.n:,}", f"{count.of:,}") for count in report.invariants]
