"""Write an output: its tensors, side files and manifest."""

from __future__ import annotations

import shutil
from collections.abc import Set
from pathlib import Path

from bridge.core.output.names import CALIBRATION, CARD, ENGINES, JOURNAL
from bridge.core.remote.store import check_names
from bridge.quant.schemes.grammar import Gate
from bridge.streaming.context import ConversionContext
from bridge.targets import load_target
from bridge.targets.manifest import Manifest, file_digests

CHUNK = 8 << 20  # bytes of a side file that are copied at once


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
