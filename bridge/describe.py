"""What `qbridge show` and `qbridge check` find behind a name or a path; reads what is written, changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.errors import BridgeError, SourceError, TableError, UsageError, VerifyError, fold_layers, nearest
from bridge.json_data import parse_json
from bridge.paths import check_length
from bridge.remote.address import is_remote, shown
from bridge.remote.opening import written_at
from bridge.report import report_from_dict
from bridge.show import Columns, fold, grouped, pattern, plan_table, report_table
from bridge.values import Numeric

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.quant.calibration import Calibration
    from bridge.quant.grammar import Gate
    from bridge.quant.scheme import Scheme
    from bridge.reading import TensorReader
    from bridge.tables.files import TableFile

MOST_VALUES = 64 << 20  # of a manifest, some hundred for a tensor
LISTS = ("schemes", "targets", "architectures")
Said = tuple[Any, list["RenderableType"]]  # plain data for --json, and what is printed without it


class Problem(NamedTuple):
    """One thing that is wrong with a file; `fatal` decides the exit code."""

    text: str
    fatal: bool = True


def describe(what: str, every: bool = False, dialect: str | None = None) -> Said:
    """Say what a list, scheme, recipe, table, written model or calibration holds; UsageError for anything else."""
    if dialect:
        return _merged(what, dialect, every)
    if what in LISTS:
        return {"schemes": _schemes, "targets": _targets, "architectures": _architectures}[what]()
    check_length(what)
    path = written_at(what)
    if path.is_dir():
        return _model(path, every)
    if path.suffix == ".safetensors" and path.is_file():
        from bridge.quant.calibration import Calibration

        calibration = Calibration.load(path)
        data = {"provenance": dataclasses.asdict(calibration.provenance), "applied": _plain(calibration.applied)}
        return data, [calibration_table(calibration)]
    if path.suffix in (".onnx", ".json") and path.is_file():
        return _model(path.parent, every)
    if is_remote(what):
        raise UsageError(f"{path}: neither a written model nor a calibration")
    return _table(what) or _scheme(what)


def check_path(path: str | Path) -> list[Problem]:
    """What is wrong with a written model or .onnx file (lint), a recipe, a scheme or a table."""
    if is_remote(path):
        raise UsageError(f"{shown(str(path))}: check reads what lies here; download it first")
    check_length(path)
    path = Path(path)
    if path.is_dir() or path.suffix == ".onnx":
        return [Problem(finding, finding.startswith("error")) for finding in _lint(path)]
    if path.suffix != ".toml":
        raise UsageError(f"{path}: check reads written models, .onnx files, and recipes or tables in .toml")
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        _check_toml(path)
    except BridgeError as error:
        return [Problem(str(error))]
    return []


def _lint(path: Path) -> list[str]:
    """What breaks the rules of the runtime that loads it: of our own target, else of what its files look like.

    Float tensors of a model that is a directory are read whole.
    """
    if (path / "bridge.json").is_file():
        from bridge.finish import load_manifest
        from bridge.targets import load_target
        from bridge.written import open_written

        plan = load_manifest(path).plan
        target = load_target(plan.target)
        found = [*target.lint(path, plan), *target.audit(path)]
        return _with_values(found, (open_written(path / name, plan) for name in plan.files))
    from bridge.container import SafetensorsFile

    if (path / "rank0.safetensors").is_file():
        from bridge.trtllm.lint import lint as lint_ranks

        return _with_values(lint_ranks(path), map(SafetensorsFile, sorted(path.glob("rank*.safetensors"))))
    if any(path.glob("model*.safetensors")) and not (path / "model.onnx").is_file():
        from bridge.unified.lint import lint as lint_checkpoint

        return _with_values(lint_checkpoint(path), map(SafetensorsFile, sorted(path.glob("model*.safetensors"))))
    from bridge.graph.lint import lint

    return [str(finding) for finding in lint(path)]


def _with_values(found: list[str], files: Iterable[TensorReader]) -> list[str]:
    """Findings, and the tensors that hold NaN or infinity; a file that cannot be read is told once."""
    from bridge.finite import not_finite

    bad: list[str] = []
    try:
        for name in not_finite(files):
            bad.append(name)
    except SourceError as error:
        found += [line for line in [f"error [files] {error}"] if line not in found]
    return [*found, *(f"error [values] {name}: holds NaN or infinity" for name in fold_layers(bad))]


def _check_toml(path: Path) -> None:
    from bridge.quant.scheme import load_scheme
    from bridge.tables.arch import parse_roles
    from bridge.tables.files import parse_table

    try:
        table = parse_table(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not a text in UTF-8: {error}") from error
    if isinstance(table.data.get("architectures"), dict):
        _check_dialect(table)
    elif "architectures" in table.data:
        _check_arch(table)
    elif "index" in table.data and "dims" in table.data:
        parse_roles(table)
    elif "base" in table.data or "weight" in table.data:
        load_scheme(path)
    else:
        raise TableError(
            f"{path}: neither a recipe (it has `base`), nor a scheme ([[weight]]), nor a table of an architecture "
            f"(`architectures`); its keys are {', '.join(table.data) or 'none'}"
        )


def _check_arch(file: TableFile) -> None:
    """One architecture's table, and the dialects that it says it has a layout in."""
    from bridge.sources.foreign_config.families import check_family
    from bridge.tables.arch import layouts_of, load_roles, parse_arch
    from bridge.tables.check import check_table
    from bridge.tables.dialect import load_dialect, with_layouts
    from bridge.tables.dialect_check import check_dialect

    table = parse_arch(file, load_roles())
    problems = [*check_table(table), *check_family(table)]
    for name, words in layouts_of(file).items():
        dialect = with_layouts(load_dialect(name), words)
        problems += [problem for architecture in words for problem in check_dialect(dialect, table, architecture)]
    if problems:
        raise TableError("\n".join(problems))


def _check_dialect(file: TableFile) -> None:
    from bridge.tables.arch import load_arch, load_roles
    from bridge.tables.dialect import parse_dialect
    from bridge.tables.dialect_check import check_dialect

    dialect = parse_dialect(file, load_roles())
    known = {architecture: load_arch(architecture) for architecture in dialect.architectures}
    problems = [problem for name, table in known.items() if table for problem in check_dialect(dialect, table, name)]
    problems += [f"no table lists `{name}`" for name, table in known.items() if table is None]
    if problems:
        raise TableError("\n".join(problems))


def _schemes() -> Said:
    from bridge.quant.scheme import load_scheme, scheme_names

    schemes = [load_scheme(name) for name in scheme_names()]
    rows = [(s.name, weights(s), numeric(s.input), s.algorithm, needs(s), s.summary) for s in schemes]
    columns = ("scheme", "weights", "activations", "algorithm", "calibration", "what it is")
    return [_scheme_data(scheme) for scheme in schemes], [Columns(columns, rows)]


def _targets() -> Said:
    from bridge.targets import load_target, target_names

    data: dict[str, dict[str, str]] = {}
    for name in target_names():
        options = dataclasses.fields(load_target(name).Options)
        data[name] = {entry.name: str(entry.metadata.get("help", "")) for entry in options}
    rows = [(name, option, text) for name, options_ in data.items() for option, text in options_.items()]
    return data, [Columns(("target", "option", "what it does"), rows)]


def _architectures() -> Said:
    data = architectures()
    rows = [(name, ", ".join(classes)) for name, classes in data.items()]
    note = (
        "An architecture without a table is traced with torch; it has no roles, so recipes match its modules by name."
    )
    return data, [Columns(("table", "architectures"), rows), "", note]


def architectures() -> dict[str, list[str]]:
    """Table -> the classes of transformers that it describes."""
    from bridge.tables.arch import arch_files
    from bridge.tables.files import read_table

    return {path.stem: list(read_table(path).data["architectures"]) for path in arch_files()}


def _table(what: str) -> Said | None:
    """An architecture's table; None where there is none of that name."""
    from bridge.tables.merged import find_table, lines_of

    table = find_table(what)
    if table is None:
        return None
    lines = lines_of(table)
    rows = [(line.tensor, line.roles, line.when) for line in lines]
    data = [{"tensor": line.tensor, "roles": line.roles, "when": line.when} for line in lines]
    return data, [f"{table.file.name}: {', '.join(table.architectures)}", "", Columns(("tensor", "role", "if"), rows)]


def _merged(what: str, dialect: str, every: bool) -> Said:
    """An architecture's table beside a dialect's; `every`: with spellings that are only read."""
    from bridge.tables.dialect import dialect_names, load_dialect
    from bridge.tables.merged import find_table, merged

    table = find_table(what)
    if table is None:
        known = [name for names in architectures().items() for name in (names[0], *names[1])]
        raise UsageError(f"{what!r} is no architecture with a table; {nearest(what, known)}")
    if dialect not in dialect_names():
        raise UsageError(f"{dialect!r} is no dialect; {nearest(dialect, dialect_names())}")
    native = load_dialect(dialect)
    lines = merged(table, native, what, every)
    made = [line.made if line.written else f"{line.made}, read only" for line in lines]
    rows = [(line.tensor, line.roles, line.when, line.native, text) for line, text in zip(lines, made, strict=True)]
    columns = ("Hugging Face", "role", "where", dialect, "made from")
    return _plain(lines), [f"{table.file.name}, {native.file.name}", "", Columns(columns, rows)]


def _scheme(what: str) -> Said:
    from bridge.quant.scheme import load_scheme, scheme_names

    try:
        scheme = load_scheme(what)
    except UsageError as error:
        known = [*LISTS, *scheme_names(), *architectures()]
        raise UsageError(
            f"{what!r} is no list, scheme, recipe, table, written model or calibration here; {nearest(what, known)}"
        ) from error
    rows = [
        ("what it is", scheme.summary),
        ("weights", weights(scheme)),
        ("activations", numeric(scheme.input)),
        ("KV cache", numeric(scheme.kv)),
        ("algorithm", " ".join([scheme.algorithm, *(f"{k}={v:g}" for k, v in scheme.options)])),
        ("calibration", needs(scheme)),
        ("gate, a weight", _gate(scheme.parity.tensor)),
        ("gate, outputs", _gate(scheme.parity.output)),
    ]
    rules = [(rule.label, rule.quant, _matches(rule)) for rule in scheme.rules]
    tables: list[RenderableType] = [Columns(("scheme", scheme.name), rows)]
    tables += ["", Columns(("rule", "quant", "where"), rules)] if rules else []
    return _scheme_data(scheme), tables


def _scheme_data(scheme: Scheme) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(scheme).items() if key not in ("origin", "depth")}


def _matches(rule: Any) -> str:
    layers = [f"{a}..{b}" if a != b else str(a) for a, b in rule.layers]
    said = {"roles": rule.roles, "modules": rule.modules, "layers": layers}
    return "; ".join(f"{key} {', '.join(values)}" for key, values in said.items() if values) or "everywhere"


def weights(scheme: Scheme) -> str:
    """The weight numerics of a scheme in words."""
    return ", then ".join(numeric(n) for n in scheme.weight)


def numeric(entry: Numeric | None) -> str:
    """A numeric in words.

    >>> numeric(Numeric("int4", "block", (128,)))
    'int4 per block of 128'
    """
    if entry is None:
        return "not quantized"
    block = f" of {'x'.join(map(str, entry.block))}" if entry.block else ""
    scale = f", {entry.scale_dtype} scales" if entry.scale_dtype != "float32" else ""
    return f"{entry.dtype} per {entry.per}{block}{scale}{', at run time' if entry.dynamic else ''}"


def needs(scheme: Scheme) -> str:
    """Whether a scheme is calibrated, and where that can run."""
    if not scheme.needs_calibration:
        return "none"
    return f"needs CUDA: {scheme.needs_cuda}" if scheme.needs_cuda else "CPU or CUDA"


def _gate(gate: Gate) -> str:
    return f"cosine at least {gate.cosine:g}, norm ratio {gate.norm[0]:g} to {gate.norm[1]:g}"


def _model(directory: Path, every: bool) -> Said:
    """A written model, from its manifest and its report."""
    from bridge.plan_json import plan_from_dict

    manifest = read_json(directory / "bridge.json", f"{directory}: not written by bridge")
    data: dict[str, Any] = {"manifest": manifest}
    tables: list[RenderableType] = []
    if "plan" in manifest:
        tables.append(plan_table(plan_from_dict(manifest["plan"]), every))
    if (directory / "report.json").is_file():
        data["report"] = read_json(directory / "report.json", str(directory))
        tables += ["", report_table(report_from_dict(data["report"]))]
    return data, tables


def read_json(path: Path, what: str) -> Any:
    """Content of a file that bridge wrote; VerifyError says `what` is wrong where it is not there or not JSON."""
    try:
        return parse_json(path.read_bytes(), MOST_VALUES)
    except OSError as error:
        raise VerifyError(f"{what}: {path.name} is missing ({error.strerror})") from error
    except ValueError as error:
        raise VerifyError(f"{what}: {path.name} is not JSON: {error}") from error


def calibration_table(calibration: Calibration) -> RenderableType:
    """Provenance, and each statistic with its range over the modules."""
    from rich.console import Group

    made = [(f.name, str(getattr(calibration.provenance, f.name))) for f in dataclasses.fields(calibration.provenance)]
    rows = []
    for kind in ("input_amax", "smoothing_amax", "awq_scale", "k_amax", "v_amax"):
        for group in grouped(getattr(calibration, kind).items(), lambda item: pattern(f"{item[0]}.")):
            low, high = min(a.min() for _, a in group), max(a.max() for _, a in group)
            module = fold([f"{name}." for name, _ in group])[:-1]
            rows.append((kind, module, str(len(group)), f"{low:.4g}", f"{high:.4g}"))
    columns = ("statistic", "module", "n", "least", "largest")
    parts: list[RenderableType] = [Columns(("calibration", ""), made), "", Columns(columns, rows, right=(2, 3, 4))]
    policies = [(a.module, a.what, a.case, a.policy, f"{a.value:.4g}") for a in calibration.applied]
    if policies:
        parts += ["", Columns(("module", "statistic", "case", "policy", "value"), policies, right=(4,))]
    return Group(*parts)


def _plain(rows: Any) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
