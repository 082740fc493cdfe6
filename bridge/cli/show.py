"""`qbridge show`: describe a list, scheme, recipe, table, written model or calibration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from bridge.cli.schemes import scheme_data, schemes
from bridge.cli.terminal import Terminal
from bridge.cli.verb import no_bars, verb
from bridge.core.addresses import check_length, is_remote
from bridge.core.errors import UsageError, VerifyError
from bridge.core.mappings import read_table, table_files
from bridge.core.parsing.limited import MAX_WRITTEN_VALUES, parse_json
from bridge.core.parsing.typed_json import typed
from bridge.core.records import plain
from bridge.core.remote.opening import written_at
from bridge.core.text import nearest, number
from bridge.planning.contract_files import runtimes
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.describe import needs, numeric, weights
from bridge.quant.schemes.catalog import (
    BEST,
    RULE,
    candidates_by_default,
    layout_of,
    rules_of,
    scheme_names,
    without_data,
)
from bridge.quant.schemes.grammar import Gate
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import TITLES, Quality, read_quality
from bridge.quant.schemes.scheme import Rule
from bridge.reporting.columns import Columns
from bridge.reporting.plan_table import plan_table
from bridge.reporting.report import report_from_dict, report_table
from bridge.tables.architectures.arch import ArchTable
from bridge.tables.dialects.dialect import dialect_names, load_dialect
from bridge.tables.dialects.listing import composite_lines, find_composite, find_table, lines_of, merged
from bridge.targets import load_target, target_names
from bridge.targets.manifest import manifest_data

SCHEMES = "schemes"  # the list that takes --for and --all
Description = tuple[Any, list[RenderableType]]  # plain data for --json, and what is printed without it


def describe(what: str, every: bool = False, dialect: str | None = None, runtime: str | None = None) -> Description:
    """Describe a list, scheme, recipe, table, written model or calibration; UsageError for anything else."""
    if what == SCHEMES:
        return schemes(every, runtime)
    if runtime:
        raise UsageError(f"--for {runtime} narrows the list of schemes: `qbridge show {SCHEMES} --for {runtime}`")
    if dialect:
        return _merged(what, dialect, every)
    if what in LISTS:
        return LISTS[what]()
    check_length(what)
    path = written_at(what)
    if path.is_dir():
        return _model(path, every)
    if path.suffix == ".safetensors" and path.is_file():
        calibration = Calibration.load(path)
        data = {"provenance": dataclasses.asdict(calibration.provenance), "applied": plain(calibration.applied)}
        return data, [calibration_table(calibration)]
    if path.suffix in (".onnx", ".json") and path.is_file():
        return _model(path.parent, every)
    if is_remote(what):
        raise UsageError(f"{path}: neither a written model nor a calibration")
    return _table(what) or _scheme(what)


def _targets() -> Description:
    data: dict[str, dict[str, str]] = {}
    for name in target_names():
        options = dataclasses.fields(load_target(name).Options)
        data[name] = {entry.name: str(entry.metadata.get("help", "")) for entry in options}
    rows = [(name, option, text) for name, options_ in data.items() for option, text in options_.items()]
    return data, [Columns(("target", "option", "what it does"), rows)]


def _architectures() -> Description:
    data = architectures()
    rows = [(name, ", ".join(classes)) for name, classes in data.items()]
    note = (
        "An architecture without a table is traced with torch and has no roles, so recipes match its modules by name."
    )
    return data, [Columns(("table", "architectures"), rows), "", note]


def _runtimes() -> Description:
    rows, data = list[tuple[str, str]](), []
    for runtime in runtimes():
        rows.append((runtime.name, runtime.title))
        for contract in runtime.contracts:
            schemes = [name for name in scheme_names() if not contract.lacks(load_scheme(name).formats)]
            rows.append((f"  {contract.flags()}", number(len(schemes), "scheme")))
        data.append(plain(runtime))
    note = (
        "`qbridge show schemes --all --for PROGRAM` names the schemes.\n"
        "Each program is a file of mappings/runtimes, which names what shows it."
    )
    return data, [Columns(("--for, what it loads", "program"), rows), "", note]


def _environment() -> Description:
    from bridge.cli.environment import environment  # packaging is loaded for nothing else

    return environment()


LISTS = {
    "targets": _targets,
    "architectures": _architectures,
    "runtimes": _runtimes,
    "environment": _environment,
}


def architectures() -> dict[str, list[str]]:
    """Table -> the transformers classes that it describes."""
    return {
        path.stem: list(read_table(path).data["architectures"])
        for kind in ("arch", "composites")
        for path in table_files(kind)
    }


def _table(what: str) -> Description | None:
    """An architecture's table; None if there is none of that name."""
    table = find_table(what) or find_composite(what)
    if table is None:
        return None
    lines = lines_of(table) if isinstance(table, ArchTable) else composite_lines(table)
    rows = [(line.tensor, line.roles, line.when) for line in lines]
    data = [{"tensor": line.tensor, "roles": line.roles, "when": line.when} for line in lines]
    return data, [f"{table.file.name}: {', '.join(table.architectures)}", "", Columns(("tensor", "role", "if"), rows)]


def _merged(what: str, dialect: str, every: bool) -> Description:
    """An architecture's table next to a dialect's; `every`: with spellings that are only read."""
    table = find_table(what)
    if find_composite(what):
        raise UsageError(f"{what} has a text model inside, and no dialect has a layout for it; leave --dialect out")
    if table is None:
        known = [name for names in architectures().items() for name in (names[0], *names[1])]
        raise UsageError(f"no table for {what!r}; {nearest(what, known)}")
    if dialect not in dialect_names():
        raise UsageError(f"no dialect named {dialect!r}; {nearest(dialect, dialect_names())}")
    native = load_dialect(dialect)
    lines = merged(table, native, what, every)
    rows = [
        (line.tensor, line.roles, line.when, line.native, line.made if line.written else f"{line.made}, read only")
        for line in lines
    ]
    columns = ("Hugging Face", "role", "if", dialect, "made from")
    return plain(lines), [f"{table.file.name}, {native.file.name}", "", Columns(columns, rows)]


def _scheme(what: str) -> Description:
    if Path(what).is_file() and Path(what).suffix != ".toml":
        raise UsageError(
            f"{what}: neither a recipe (.toml) nor a calibration; `qbridge plan` shows what a model becomes"
        )
    if path := layout_of(what):
        return _layout(path)
    try:
        scheme = load_scheme(what)
    except UsageError as error:
        if "/" in what and not Path(what).exists():
            raise UsageError(f"{what}: no such file or directory") from error
        known = [SCHEMES, *LISTS, *scheme_names(), *architectures()]
        raise UsageError(
            f"nothing named {what!r}: expected {', '.join([SCHEMES, *LISTS])}, or a scheme, a recipe, an architecture, "
            f"an output directory or a calibration file; {nearest(what, known)}"
        ) from error
    rows = [
        ("what it is", scheme.summary),
        ("weights", weights(scheme)),
        ("activations", numeric(scheme.input)),
        ("KV cache", numeric(scheme.kv)),
        ("algorithm", " ".join([scheme.algorithm, *(f"{k}={v:g}" for k, v in scheme.options)])),
        ("calibration", needs(scheme)),
        *(("quality", _quality(*row)) for row in read_quality().get(scheme.name, {}).items() if not row[1].why),
        ("gate, weights", _gate(scheme.parity.tensor)),
        ("gate, outputs", _gate(scheme.parity.output)),
    ]
    rules = [(rule.label, rule.quant, _matches(rule)) for rule in scheme.rules]
    tables: list[RenderableType] = [Columns(("scheme", scheme.name), rows)]
    tables += ["", Columns(("rule", "quant", "where"), rules)] if rules else []
    return scheme_data(scheme), tables


def _layout(path: Path) -> Description:
    """A layout's rules, one of which `:best` takes."""
    names = [f"{path.stem}{RULE}{rule}" for rule in rules_of(path)]
    found = {"what it is": "the rule with the least loss on your model, measured", "without data": without_data(path)}
    rules = [(name, load_scheme(name).summary) for name in names]
    data = {"layout": path.stem, "rules": names, "tried": candidates_by_default(path), **found}
    rows = [(title, text or "every rule needs data") for title, text in found.items()]
    return data, [Columns(("scheme", f"{path.stem}{RULE}{BEST}"), rows), "", Columns(("rule", "what it is"), rules)]


def _matches(rule: Rule) -> str:
    layers = [f"{a}..{b}" if a != b else str(a) for a, b in rule.layers]
    selected = {"roles": rule.roles, "modules": rule.modules, "layers": layers}
    return "; ".join(f"{key} {', '.join(values)}" for key, values in selected.items() if values) or "everywhere"


def _quality(model: str, found: Quality) -> str:
    """Its figures on one model in words."""
    head = f"{TITLES.get(model, model)}: {found.bits:.2f} bits a weight"
    if found.kl is None:
        return f"{head}, cosine of embeddings {found.cosine:.4f}"
    return f"{head}, KL {found.kl:.4f}, perplexity {found.perplexity:.2f}"


def _gate(gate: Gate) -> str:
    return f"cosine at least {gate.cosine:g}, norm ratio {gate.norm[0]:g} to {gate.norm[1]:g}"


def _model(directory: Path, every: bool) -> Description:
    """A written model, from its manifest and its report."""
    manifest = manifest_data(directory)
    data: dict[str, Any] = {"manifest": manifest}
    tables: list[RenderableType] = []
    if "plan" in manifest:
        tables.append(plan_table(typed(Plan, manifest["plan"]), every))
    if (directory / "report.json").is_file():
        data["report"] = _report(directory / "report.json")
        tables += ["", report_table(report_from_dict(data["report"]))]
    return data, tables


def _report(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes(), MAX_WRITTEN_VALUES)
    except (OSError, ValueError) as error:
        raise VerifyError(f"{path}: not a readable report ({error}); convert again") from error


def calibration_table(calibration: Calibration) -> RenderableType:
    """Provenance, and each statistic with its range over the modules."""
    provenance = [(name, str(value)) for name, value in vars(calibration.provenance).items()]
    tables = Columns(("calibration", ""), provenance), "", Columns(*calibration.table(), right=(2, 3, 4))
    parts: list[RenderableType] = [*tables]
    policies = [(a.module, a.what, a.case, a.policy, f"{a.value:.4g}") for a in calibration.applied]
    if policies:
        parts += ["", Columns(("module", "statistic", "case", "policy", "value"), policies, right=(4,))]
    return Group(*parts)


@verb("qbridge show schemes", "what every runtime dialect json debug", quiet=no_bars)
def show(terminal: Terminal, what: str, every: bool, runtime: str | None, dialect: str | None) -> None:
    """Show a scheme, table, written model or calibration."""
    data, tables = describe(what, every, dialect, runtime)
    if terminal.json:
        terminal.print_json(data)
    else:
        terminal.print(*tables)
