"""Write a checkpoint again without the faults that need no source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote, shown
from bridge.core.arrays import Buffers
from bridge.core.errors import UsageError, VerifyError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.output.directory import Work, check_disk, output_directory
from bridge.core.output.names import MANIFEST, REPAIR
from bridge.core.output.replace import check_free
from bridge.core.parsing.limited import load_json
from bridge.core.progress import BYTES, Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.text import number
from bridge.core.version import __version__
from bridge.planning.memory import PIECE
from bridge.sources.quantized.fields import MODELOPT_FILE
from bridge.sources.side_files import SideFiles, plain_side_files
from bridge.streaming.run import equal_bits
from bridge.streaming.tensor_file import TensorFile
from bridge.targets.checkpoint import StreamedTarget
from bridge.targets.hf.shards import index
from bridge.targets.manifest import write_side_file
from bridge.workflows.doctor.checkpoint import INDEX, SINGLE, Checkpoint, is_checkpoint, open_checkpoint
from bridge.workflows.doctor.examine import examine, lines
from bridge.workflows.doctor.finding import Finding
from bridge.workflows.doctor.mend import Mending, mend
from bridge.workflows.doctor.model import total_size
from bridge.workflows.doctor.rescale import Rescaled, error


@dataclass(frozen=True)
class Repaired:
    """What `repair` wrote to `out`. `mended`, `left`: findings before it, and those of the output.

    `lines`: what the linter says of the output beside them, as `qbridge check` prints it. `losses`: module -> the
    relative L2 error of its weight, of those that were rescaled. `dropped`: file -> why it was not copied.
    """

    out: str
    mended: tuple[Finding, ...]
    left: tuple[Finding, ...]
    losses: dict[str, float]
    dropped: dict[str, str]
    lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no fault is left that a program would stumble over."""
        return not self.lines and not any(finding.fatal for finding in self.left)

    def to_dict(self) -> dict[str, Any]:
        known = {"out": self.out, "passed": self.passed, "losses": self.losses, "dropped": self.dropped}
        known["lines"] = list(self.lines)
        return known | {name: [f.to_dict() for f in getattr(self, name)] for name in ("mended", "left")}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"mended: {finding.told}" for finding in self.mended)
        if self.losses:
            lossless = sum(loss == 0 for loss in self.losses.values())
            worst = max(self.losses, key=lambda module: self.losses[module])
            yield (
                f"rescaled: {number(len(self.losses), 'matrix', 'matrices')}, {lossless} without a loss; the largest "
                f"relative error of a weight is {self.losses[worst]:.2g}, of {worst}"
            )
        yield from (f"not copied: {name}: {why}" for name, why in self.dropped.items())
        left = (*self.lines, *self.left)
        yield from (f"left: {finding}" for finding in left)
        yield f"{self.out}: written, every tensor compared with its file; {number(len(left), 'finding')} left"


@shows_progress
def repair(
    directory: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | bool | None = None,
) -> Repaired:
    """Write a checkpoint that another program wrote again, without the faults that need no source to be mended.

    These are the index, heads that are stored twice or not tied as the config says, lists of unquantized modules,
    promises of draft layers, names of wrappers, a config of quantization that no tensor matches, and NVFP4 scales that
    differ in a fused group. Nothing is read whole, and every tensor of the output is compared with its file.

    Args:
        directory: a local directory with config.json and safetensors; `qbridge check` says what is wrong with it.
        out: the new directory; it appears when it is whole.
        overwrite: replace `out`, if `repair` wrote it.
        resume: continue an unfinished repair of the same directory; False discards what it left.

    Raises:
        UsageError: nothing can be mended, `out` is the directory itself, or bridge wrote it.

    >>> import json, shutil
    >>> shutil.copytree("examples/models/tiny-llama", "promises")  # doctest: +ELLIPSIS
    'promises'
    >>> config = json.loads(Path("promises/config.json").read_text()) | {"num_nextn_predict_layers": 1}
    >>> _ = Path("promises/config.json").write_text(json.dumps(config))
    >>> [finding.rule for finding in bridge.repair("promises", out="mended").mended]
    ['drafts']
    """
    source, target = _refused(directory, out, overwrite)
    callback = callback_of(progress)
    callback(0, 0, "check")
    checkpoint = open_checkpoint(source)
    findings = _mendable(checkpoint)
    check_disk(target, total_size(checkpoint), "the repair")
    mending = mend(checkpoint, findings)
    sides = plain_side_files(source, checkpoint.weights)
    with output_directory(target, _identity(checkpoint), overwrite=overwrite, resume=resume, mark=REPAIR) as work:
        _write(checkpoint, mending, sides, work, callback)
        written = open_checkpoint(work.directory)
        losses, left = _verified(checkpoint, mending, written, callback)
        mended = tuple(finding for finding in findings if finding.repairs)
        result = Repaired(str(out), mended, tuple(left), losses, dict(sides.dropped), tuple(lines(written)))
        record = {"qbridge": __version__, "made_from": str(source), **result.to_dict()}
        write_side_file((json.dumps(record, indent=2) + "\n").encode(), work.directory / REPAIR)
    return result


def _mendable(checkpoint: Checkpoint) -> list[Finding]:
    """The findings; UsageError if nothing can be mended, or it is not clear which tensors are the model's."""
    source, findings = checkpoint.directory, examine(checkpoint)
    if stuck := next((finding for finding in findings if finding.rule == "index" and not finding.repairs), None):
        raise UsageError(f"{source}: {stuck.told}; {stuck.mend} first; nothing was written")
    if not any(finding.repairs for finding in findings):
        found = [*findings, *lines(checkpoint)]
        more = f"; `qbridge check {source}` says what mends the {number(len(found), 'finding')}" if found else ""
        raise UsageError(f"{source}: nothing that can be mended without the source{more}; nothing was written")
    return findings


def _refused(directory: str | Path, out: str | Path, overwrite: bool) -> tuple[Path, Path]:
    """The two paths; UsageError if the directory is not one to mend, or the other is the same or in it."""
    for path in (directory, out):
        if is_remote(path):
            raise UsageError(f"{shown(str(path))}: repair reads and writes local directories only; copy it first")
    source, target = Path(directory), Path(out)
    if not is_checkpoint(source):
        raise UsageError(f"{source}: repair takes a directory with config.json and *.safetensors")
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise UsageError(f"{target}: is the checkpoint itself, or in it; write the repaired one to another directory")
    for mark in (MANIFEST, REPAIR):
        if (source / mark).is_file() and (newer := _newer(source / mark)):
            raise UsageError(f"{source}: written by qbridge {newer}, newer than this one, {__version__}: install that")
    if (source / MANIFEST).is_file():
        raise UsageError(f"{source}: bridge wrote it: convert the model again, which mends it with its source")
    check_free(target, overwrite, REPAIR)
    return source, target


def _newer(mark: Path) -> str:
    """The version of qbridge that wrote a directory if it is newer than this one; "" if not."""
    try:
        content = load_json(mark)
    except (OSError, ValueError):
        return ""
    version = str(content.get("qbridge", "")) if isinstance(content, dict) else ""
    return version if _numbers(version) > _numbers(__version__) else ""


def _numbers(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in version.split(".")]


def _identity(checkpoint: Checkpoint) -> str:
    """A digest of the code's version, the JSON and the files; no weight is read."""
    stats = [(name, file.path.stat()) for name, file in checkpoint.files.items()]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    parts = [__version__, checkpoint.config, checkpoint.index, checkpoint.modelopt, files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _write(checkpoint: Checkpoint, mending: Mending, sides: SideFiles, work: Work, progress: Progress) -> None:
    """Write the weight files, each as it is if no tensor of it changes, then JSON and side files."""
    buffers, done, total = Buffers(), 0, total_size(checkpoint)
    weight_map: dict[str, str] = {}
    plain = {own: name for name, own in checkpoint.stored.items()}
    for name, file in checkpoint.files.items():
        names = {own: mending.names[plain[own]] for own in file.specs if plain[own] in mending.names}
        weight_map |= dict.fromkeys(names.values(), name)
        if names and name not in work.done:
            rescaled = {own: mending.rescaled[plain[own]] for own in names if plain[own] in mending.rescaled}
            if names == {own: own for own in file.specs} and not rescaled:
                write_side_file(file.path, work.directory / name)
            else:
                _write_file(file, names, rescaled, work.directory / name, buffers)
            work.mark(name, {})
        done += sum(spec.nbytes for spec in file.specs.values())
        progress(done, total, BYTES[0])
    for name, content in sides.files.items():
        write_side_file(content, work.directory / name)
    for name, data in (("config.json", mending.config), (MODELOPT_FILE, mending.modelopt)):
        before = checkpoint.config if name == "config.json" else checkpoint.modelopt
        if data is None:
            (work.directory / name).unlink(missing_ok=True)
        elif data != before:
            (work.directory / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if checkpoint.index is not None or {*weight_map.values()} != {SINGLE}:
        metadata = (checkpoint.index or {}).get("metadata")
        specs = {name: [*SafetensorsFile(work.directory / name).specs.values()] for name in {*weight_map.values()}}
        (work.directory / INDEX).write_bytes(index(specs, metadata if isinstance(metadata, dict) else {}))


def _write_file(
    file: SafetensorsFile,
    names: Mapping[str, str],
    rescaled: Mapping[str, tuple[Rescaled, str]],
    path: Path,
    buffers: Buffers,
) -> None:
    """Write the tensors of a file that stay, under their new names, some megabytes at a time."""
    specs = [replace(file.specs[own], name=new) for own, new in names.items()]
    target = TensorFile(path, specs, file.header.metadata, StreamedTarget.align)
    for own, new in names.items():
        one, part = rescaled.get(own, (None, ""))
        at, pieces = 0, one.rows(part) if one else file.pieces(own, PIECE, buffers.piece)
        for piece in pieces:
            target.write(new, piece, at)
            at += piece.nbytes


def _verified(
    checkpoint: Checkpoint, mending: Mending, written: Checkpoint, progress: Progress
) -> tuple[dict[str, float], list[Finding]]:
    """Losses and findings of the output; VerifyError for a tensor unlike the source's, or a fault that stays."""
    progress(0, 0, BYTES[1])
    for name, new in mending.names.items():
        same = new in written.specs and (
            name in mending.rescaled
            or equal_bits(checkpoint.weights, checkpoint.specs[name], written.weights, written.specs[new])
        )
        if not same:
            raise VerifyError(f"{written.directory}: {new} is not as in {checkpoint.directory}: was a file changed?")
    modules = {one.weight.module: one.weight for one, _ in mending.rescaled.values()}
    losses = {module: error(weight, written.modules[module]) for module, weight in modules.items()}
    left = examine(written)
    if again := [finding for finding in left if finding.repairs]:
        raise VerifyError(f"{written.directory}: still has a fault: {again[0]}")
    return losses, left
