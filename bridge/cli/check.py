"""`qbridge check`: tables, recipes and written models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import bridge
from bridge.cli.terminal import FAILED, Exit, Terminal
from bridge.cli.verb import no_bars, verb
from bridge.core.addresses import check_length, is_remote, shown
from bridge.core.errors import BridgeError, SourceError, TableError, UsageError
from bridge.core.mappings import TableFile, parse_table
from bridge.core.output.names import MANIFEST
from bridge.core.text import number
from bridge.quant.schemes.load import load_scheme
from bridge.sources.configs.families import check_family
from bridge.tables.architectures.arch import layouts_of, load_arch, parse_arch
from bridge.tables.architectures.composite import parse_composite, problems_of_composite
from bridge.tables.architectures.roles import load_roles, parse_roles
from bridge.tables.check import check_table
from bridge.tables.dialects.check import check_dialect
from bridge.tables.dialects.dialect import load_dialect, parse_dialect, with_layouts
from bridge.targets import check_contract
from bridge.targets.trt.engine import parser_findings
from bridge.targets.trt.gpus import parse_gpus
from bridge.targets.trt.products import rtx_version
from bridge.targets.trt.profile import parse_ranges
from bridge.targets.trt.record import RECORD, altered_engines

if TYPE_CHECKING:
    from bridge.targets.trt.record import Engines


class Problem(NamedTuple):
    """A problem of a file; `fatal` decides the exit code. `finding`: that of the doctor, for JSON."""

    text: str
    fatal: bool = True
    finding: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The problem for JSON; without a finding, its text and whether it is fatal."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def check_paths(paths: Sequence[str]) -> list[Problem]:
    """The problems of all paths. One that cannot be checked is an error, or a problem beside those of the others."""
    problems: list[Problem] = []
    for path in paths:
        try:
            found = check_path(path)
            problems += [p if p.text.startswith(f"{path}:") else p._replace(text=f"{path}: {p.text}") for p in found]
        except BridgeError as error:
            if len(paths) == 1:
                raise
            problems.append(Problem(str(error)))
    return problems


def check_path(path: str | Path) -> list[Problem]:
    """The problems of a written model, an .onnx or .gguf file (lint), a recipe, a scheme or a table."""
    if is_remote(path):
        raise UsageError(f"{shown(str(path))}: check reads local files only; download it first")
    check_length(path)
    path = Path(path)
    if path.is_dir() or path.suffix == ".onnx" or (path.suffix == ".gguf" and path.is_file()):
        lines, found = _doctored(path, _lint(path))
        return [*(Problem(finding, finding.startswith("error")) for finding in lines), *found]
    if path.suffix != ".toml" and not path.exists():
        raise SourceError(f"{path}: no such file or directory")
    if path.suffix != ".toml":
        raise UsageError(f"{path}: check reads written models, .onnx and .gguf files, and recipes or tables in .toml")
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    try:
        _check_toml(path)
    except BridgeError as error:
        return [Problem(str(error))]
    return []


def loaded_by(paths: Sequence[str], problems: Iterable[Problem]) -> Iterator[str]:
    """A line for each written model without an error: the programs whose contract it meets."""
    from bridge.reporting.loading import loading_line, loadings
    from bridge.targets.manifest import load_manifest
    from bridge.workflows.doctor.checkpoint import is_checkpoint
    from bridge.workflows.doctor.examine import served

    wrong = [problem.text for problem in problems if problem.fatal]
    for path in map(Path, paths):
        if any(text.startswith(f"{path}: ") for text in wrong):
            continue
        if _parser_findings(path) == []:
            yield f"{path}: parsed by TensorRT for RTX {rtx_version()}"
        if (path / MANIFEST).is_file() and (programs := loading_line(loadings(load_manifest(path).plan))):
            yield f"{path}: loads in {programs}"
        elif not (path / MANIFEST).is_file() and path.is_dir() and is_checkpoint(path) and (programs := served(path)):
            yield f"{path}: {programs}"


def _lint(path: Path) -> list[str]:
    """Where a model breaks the rules of its runtime: of its own target if bridge wrote it, else by its file names.

    Float tensors of a directory are read whole.
    """
    if (path / RECORD).is_file() and not (path / MANIFEST).is_file():  # engines alone
        return altered_engines(path)
    if (path / MANIFEST).is_file():
        from bridge.streaming.written import open_written
        from bridge.targets import load_target
        from bridge.targets.manifest import altered, load_manifest
        from bridge.verification.finite import with_values

        manifest = load_manifest(path)
        plan = manifest.plan
        target = load_target(plan.target)
        findings = [*target.lint(path, plan), *target.audit(path), *altered(path, manifest)]
        findings += _parser_findings(path) or []
        return with_values(findings, (open_written(path / name, plan) for name in plan.files))
    from bridge.core.formats.safetensors import SafetensorsFile
    from bridge.targets.onnx.files import graphs
    from bridge.verification.finite import with_values
    from bridge.workflows.doctor.checkpoint import weight_files

    if (path / "rank0.safetensors").is_file():
        from bridge.targets.trtllm.lint import lint as lint_ranks

        return with_values(lint_ranks(path), map(SafetensorsFile, sorted(path.glob("rank*.safetensors"))))
    weights = (
        weight_files(path) if (path / "config.json").is_file() else [f.name for f in path.glob("model*.safetensors")]
    )
    if weights and not graphs(path)[0].is_file():
        from bridge.targets.hf.lint import lint as lint_checkpoint

        return with_values(lint_checkpoint(path), (SafetensorsFile(path / name) for name in sorted(weights)))
    graph = graphs(path)[0] if path.is_dir() else path
    if files := [path] if path.suffix == ".gguf" else [] if graph.is_file() else sorted(path.glob("*.gguf")):
        from bridge.core.formats.gguf import GgufFile
        from bridge.targets.gguf.lint import lint as lint_gguf

        return [finding for file in files for finding in with_values(lint_gguf(file), map(GgufFile, [file]))]
    from bridge.targets.onnx.lint import RULES, lint
    from bridge.targets.ort import RULES as ORT_RULES

    # ONNX Runtime's own operators, which target ort writes: TensorRT's rules are not for such a graph
    rules = [rule for rule in RULES if rule.id in ORT_RULES] if _is_fused(path) else RULES
    return [*(str(finding) for finding in lint(path, rules=rules)), *(_parser_findings(path) or [])]


def _doctored(path: Path, lines: list[str]) -> tuple[list[str], list[Problem]]:
    """The linter's lines, and what the doctor finds in a checkpoint that others wrote, in place of some of them."""
    from bridge.workflows.doctor.checkpoint import is_checkpoint
    from bridge.workflows.doctor.examine import examined, others

    of_others = path.is_dir() and not (path / MANIFEST).is_file() and is_checkpoint(path)
    findings = examined(path) if of_others else None
    if findings is None:
        return lines, []
    return others(lines), [Problem(str(found), found.fatal, found.to_dict()) for found in findings]


def _is_fused(path: Path) -> bool:
    """Whether a graph has operators that only ONNX Runtime knows."""
    from bridge.targets.onnx.lint.model import read_model
    from bridge.targets.ort.edit import MICROSOFT

    return any(node.domain == MICROSOFT for node in read_model(path, None).nodes)


def _parser_findings(path: Path) -> list[str] | None:
    """What TensorRT's parser refuses; None where it is not asked: of other targets' files, or not installed."""
    if (path / MANIFEST).is_file():
        from bridge.targets.manifest import load_manifest

        asked = load_manifest(path).plan.target == "trt"
    else:
        found = path if path.suffix == ".onnx" and path.is_file() else path / "model.onnx"
        asked = found.is_file() and not _is_fused(path)
    return parser_findings(path) if asked else None


def _built(paths: Sequence[str], gpus: str, profile: str | None = None) -> tuple[list[Problem], dict[str, Engines]]:
    """Why no engines of some models can be built, and what others compile to; the engines are removed."""
    from bridge.core.output.temporary import temporary_directory
    from bridge.targets.manifest import load_manifest

    if not paths:
        raise UsageError("--build: name a directory that target trt wrote")
    parse_gpus(gpus)
    parse_ranges(profile or {})
    for path in paths:
        if not (Path(path) / MANIFEST).is_file() or load_manifest(Path(path)).plan.target != "trt":
            raise UsageError(f"{path}: --build takes directories that target trt wrote")
    problems, built = [], {}
    for path in paths:
        with temporary_directory(Path(path).absolute().parent) as folder:
            try:
                built[path] = bridge.engine(path, gpus, folder / "engines", profile=profile, progress=False)
            except BridgeError as error:
                problems.append(Problem(f"{path}: error [builder] {error}"))
    return problems, built


def _check_toml(path: Path) -> None:
    problems: list[str] = []
    try:
        table = parse_table(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not a UTF-8 text: {error}") from error
    if isinstance(table.data.get("architectures"), dict):
        problems = _check_dialect(table)
    elif "carried" in table.data:
        problems = list(problems_of_composite(parse_composite(table)))
    elif "architectures" in table.data:
        problems = _check_arch(table)
    elif "index" in table.data and "dims" in table.data:
        parse_roles(table)
    elif "writes" in table.data:
        problems = check_contract(table)
    elif "base" in table.data or "weight" in table.data:
        load_scheme(path)
    else:
        raise TableError(
            f"{path}: neither a recipe (has `base`), nor a scheme (has [[weight]]), nor the table of an architecture "
            f"(has `architectures`), nor a contract (has [writes.NAME]); its keys are {', '.join(table.data) or 'none'}"
        )
    if problems:
        raise TableError("\n".join(problems))


def _check_arch(file: TableFile) -> list[str]:
    """The problems of one architecture's table, and of the dialects that it has a layout in."""
    table = parse_arch(file, load_roles())
    problems = [*check_table(table), *check_family(table)]
    for name, words in layouts_of(file).items():
        dialect = with_layouts(load_dialect(name), words)
        problems += [problem for architecture in words for problem in check_dialect(dialect, table, architecture)]
    return problems


def _check_dialect(file: TableFile) -> list[str]:
    dialect = parse_dialect(file, load_roles())
    known = {architecture: load_arch(architecture) for architecture in dialect.architectures}
    problems = [problem for name, table in known.items() if table for problem in check_dialect(dialect, table, name)]
    return problems + [f"no table lists `{name}`" for name, table in known.items() if table is None]


@verb("qbridge check llama-fp8 recipe.toml", "paths build profile json debug", quiet=no_bars)
def check(terminal: Terminal, paths: list[str] | None, build: str | None, profile: str | None) -> None:
    """Check tables and schemes, or the files in PATH.

    Exits with 1 if anything is wrong.
    """
    if profile and not build:
        raise UsageError("--profile is for engines that are built: give --build too, for example rtx4090")
    problems = check_paths(paths) if paths else [Problem(line) for line in bridge.check()]
    refused, built = _built(paths or [], build, profile) if build else ([], {})
    problems += refused
    if terminal.json:
        found = [problem.to_dict() for problem in problems]
        terminal.print_json(
            {"problems": found, "engines": {path: asdict(one) for path, one in built.items()}} if build else found
        )
    else:
        where = ", ".join(map(str, paths or [])) or "tables and schemes"
        written = any((Path(path) / MANIFEST).is_file() for path in paths or [])
        well = "all is well" + ("; `qbridge verify` compares the weights with their source" if written else "")
        notes = sum(not problem.fatal for problem in problems)
        parts = [number(len(problems) - notes, "problem")] if len(problems) > notes else []
        count = " and ".join([*parts, *([number(notes, "note")] if notes else [])]) or well
        made = [f"{path}: built {line}" for path, one in built.items() for line in one.lines()]
        terminal.print(
            *(problem.text for problem in problems), *loaded_by(paths or [], problems), *made, f"{where}: {count}"
        )
    if any(problem.fatal for problem in problems):
        raise Exit(FAILED)
