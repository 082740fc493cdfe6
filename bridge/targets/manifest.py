"""Write an output with its record, bridge.json, and read the record."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Collection, Set
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bridge.core.errors import VerifyError
from bridge.core.output.names import CALIBRATION, CARD, ENGINES, JOURNAL, MANIFEST
from bridge.core.parsing.limited import MAX_WRITTEN_VALUES, parse_json
from bridge.core.parsing.typed_json import by_line, typed
from bridge.core.remote.store import check_names
from bridge.core.text import described
from bridge.core.version import __version__
from bridge.planning.plan import Plan
from bridge.quant.schemes.grammar import Gate
from bridge.streaming.context import ConversionContext, WriteResult
from bridge.targets import load_target

# Files that users adjust after a conversion: settings of generation and sessions, chat templates, texts.
ADJUSTED = ("generation_config.json", "genai_config.json", "tokenizer_config.json", "*.jinja", "*.md", "*.txt")
CHUNK = 8 << 20  # bytes of a side file that are copied at once


@dataclass(frozen=True)
class Manifest:
    """Content of `bridge.json`: the plan and the gates that verify applies. Equal runs write equal manifests.

    `files`: sha256 of each file beside the weights, by its path below the output.
    """

    plan: Plan
    gates: dict[str, Gate]
    output_gate: Gate
    written: WriteResult
    files: dict[str, str]

    def save(self, directory: Path) -> None:
        data = {
            "qbridge": __version__,
            "plan_digest": self.plan.digest,
            "gates": {module: asdict(gate) for module, gate in self.gates.items()},
            "output_gate": asdict(self.output_gate),
            "written": asdict(self.written),
            "files": self.files,
            "plan": self.plan.to_dict(),
        }
        (directory / MANIFEST).write_text(by_line(data, levels=3) + "\n")


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of a written model; VerifyError if there is none, or its plan was altered."""
    data = manifest_data(directory)
    try:
        manifest = typed(Manifest, {name: data[name] for name in ("plan", "gates", "output_gate", "written", "files")})
    except (KeyError, TypeError, ValueError) as error:
        raise VerifyError(
            f"{directory / MANIFEST} cannot be read ({type(error).__name__}: {error}): it names qbridge "
            f"{described(data.get('qbridge'))}, and this one is {__version__}; convert again"
        ) from error
    if manifest.plan.digest != data.get("plan_digest"):
        raise VerifyError(f"{directory / MANIFEST} was altered: its plan does not have its plan_digest; convert again")
    return manifest


def manifest_data(directory: Path) -> dict[str, Any]:
    """The content of a written model's `bridge.json`; VerifyError if there is none."""
    try:
        data = parse_json((directory / MANIFEST).read_bytes(), MAX_WRITTEN_VALUES)
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        return data
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not directory.is_dir():
            raise VerifyError(f"{directory}: no such directory; name one that `convert` wrote") from error
        raise VerifyError(
            f"{directory} has no readable {MANIFEST}, so bridge did not write this model ({error}); "
            "name a directory that `convert` wrote, or convert this model first: "
            f"qbridge convert {shlex.quote(str(directory))} --target TARGET"
        ) from error


def file_digests(directory: Path, exclude: Collection[str], globs: Collection[str] = ()) -> dict[str, str]:
    """sha256 of each file below `directory` but those of `exclude` and of the globs, by path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    left = {name: path for name, path in names.items() if not any(fnmatchcase(name, glob) for glob in globs)}
    return {name: _sha256(path) for name, path in left.items() if name not in exclude}


def altered(directory: Path, manifest: Manifest) -> list[str]:
    """A line for each file beside the weights that is missing, or is not as it was written.

    That is an error, except in files that users adjust after a conversion.
    """
    findings = []
    for name, digest in manifest.files.items():
        path = directory / name
        if not path.is_file():
            findings.append(f"error [files] {name}: is missing; convert again")
        elif _sha256(path) != digest:
            adjusted = any(fnmatchcase(name, pattern) for pattern in ADJUSTED)
            kind, remedy = ("warning", "") if adjusted else ("error", "; convert again")
            findings.append(f"{kind} [files] {name}: was changed after it was written{remedy}")
    return findings


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(context: ConversionContext) -> Manifest:
    """Let the target write, copy the side files, and save the manifest that `verify` needs."""
    plan, source, scheme = context.plan, context.source, context.scheme
    directory = context.work.directory
    check_names(plan.side_files, source.where)
    _clear(directory, {*plan.files, CALIBRATION, JOURNAL})
    written = load_target(plan.target).write(context, directory)
    for name in plan.side_files:
        if not (directory / name).exists():  # else the target changed what it says
            write_side_file(source.side_files[name], directory / name)
    gates = {s.site.module: scheme.gate_of(s.site) for s in plan.quantized if s.site and scheme}
    digests = file_digests(directory, {*plan.files, CALIBRATION, JOURNAL, CARD}, ENGINES)
    manifest = Manifest(plan, gates, scheme.parity.output if scheme else Gate(1.0, (1.0, 1.0)), written, digests)
    manifest.save(directory)
    return manifest


def write_side_file(content: Path | bytes, path: Path) -> None:
    """Copy a file, or write its content, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    with content.open("rb") as file, path.open("wb") as copy:
        shutil.copyfileobj(file, copy, CHUNK)


def _clear(directory: Path, kept: Set[str]) -> None:
    """Remove files of a killed run, which may be incomplete; keep those whose tensors its journal lists."""
    for path in directory.rglob("*"):
        if path.is_file() and path.relative_to(directory).as_posix() not in kept:
            path.unlink()
