"""Plan every row from headers: its output, its needs, its calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bridge.api.best.ahead import digest_as_measured, resolve_ahead
from bridge.api.best.candidates import Candidates
from bridge.api.request import ResolvedRequest, data_of
from bridge.calibration.data import Sampling
from bridge.calibration.requirements import check_device, default_samples
from bridge.core.addresses import is_remote, server_of, shown
from bridge.core.errors import BridgeError, CalibrationError, SourceError, UsageError, is_unreachable
from bridge.core.parsing.problems import Problems
from bridge.core.remote.staged import staging_path
from bridge.core.remote.upload import check_out
from bridge.core.version import versions
from bridge.planning.memory import FRAMEWORKS, FRESH, RUN_BYTES_PER_VALUE, process_memory
from bridge.quant.calibration import Calibration
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.targets import load_target
from bridge.workflows.batch.job import failure, outcome_of_chain, request_of, sampling_of
from bridge.workflows.batch.values import FOR_CALIBRATION, Engine, Outcome, Row

DIGESTED = 16 << 20  # first bytes of a file that its digest covers; calibration reads less of a text


@dataclass(frozen=True)
class PlannedRow:
    """A planned row, or the failure that already decides it (`failed`).

    `memory`: planned bytes of its process; `least`: bytes without which it fails (with less than `memory`, only the
    comparison at the end fails). `disk`: bytes on disk; `bytes`: the plan's part of them. `work`: bytes read and
    written. `values`: the model's. `key`: for rows that calibrate, a digest of everything the statistics depend on;
    rows with the same key share a calibration. `statistics`: digests of its scheme, or rules, and data; () if unknown.
    `calibration`: the digest of a given one. `measured`: of a choice such as int4:best, the plan's digest with the rule
    that a calibration was made for. `side_files`: name and digest. `kept`: how a chain ended whose steps an earlier run
    finished.
    """

    row: Row
    digest: str = ""
    fingerprint: str = ""
    memory: int = 0
    least: int = 0
    disk: int = 0
    bytes: int = 0
    work: int = 0
    values: int = 0
    key: str = ""
    statistics: tuple[str, ...] = ()
    calibration: str = ""
    measured: Callable[[Calibration], str] | None = None
    side_files: tuple[tuple[str, str], ...] = ()
    failed: Outcome | None = None
    kept: Outcome | None = None


class UnreachableServers:
    """Servers that did not answer, so that each is waited for only once. A server that answered before is not added."""

    def __init__(self) -> None:
        # server -> its first address and the error; None if it answered; "" stands for no server
        self._servers: dict[str, tuple[str, Exception] | None] = {"": None}

    def check(self, url: str, kind: type[BridgeError]) -> None:
        """Raise a `kind` if the server of an address did not answer before."""
        if failed := self._servers.get(server_of(url)):
            first, why = failed
            raise kind(
                f"{shown(url)}: its server does not answer, as for {first}; check the address and the network, and "
                "run again"
            ) from why

    def answered(self, url: str) -> None:
        self._servers.setdefault(server_of(url), None)

    def note(self, url: str, error: Exception) -> None:
        if is_unreachable(error):
            self._servers.setdefault(server_of(url), (shown(url), error))


def plan_rows(rows: Sequence[Row], engine: Engine, unreachable: UnreachableServers | None = None) -> list[PlannedRow]:
    """Plan each row; a row that cannot be planned is a failed one."""
    opened, planned = _Opened(unreachable or UnreachableServers()), []
    for row in rows:
        try:
            planned.append(_plan_chain(row, row.chain) if row.chain else _plan(row, opened, engine))
        except Exception as error:  # a bug fails its row only, as in a worker
            planned.append(PlannedRow(row, failed=failure(row.name, error)))
    return planned


def unused_arguments(planned: Sequence[PlannedRow]) -> list[str]:
    """A note for each argument that a row has and no row uses, since none calibrates."""
    rows = [one.row for one in planned if not (one.failed or one.row.chain)]
    if any(one.key for one in planned):
        return []
    unused = [name for name in FOR_CALIBRATION if any(getattr(row, name) is not None for row in rows)]
    return [f"{name} is not used: no row calibrates" for name in unused]


@dataclass
class _Opened:
    """Sources, or why they cannot be opened, and data that rows share while they are planned: each is opened once."""

    unreachable: UnreachableServers
    sources: dict[str, Source | BridgeError] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)

    def source(self, row: Row) -> Source:
        name = _model_of(row)
        if name not in self.sources:
            self.unreachable.check(row.model, SourceError)
            try:
                opened = open_source(row.model, row.config, row.tokenizer, row.base, row.adapter)
                self.sources[name] = rotated(opened, row.rotate)
                self.unreachable.answered(row.model)
            except BridgeError as error:
                self.sources[name] = error
                self.unreachable.note(row.model, error)
        source = self.sources[name]
        if isinstance(source, BridgeError):
            raise source
        return source

    def data_digest(self, row: Row, sampling: Sampling) -> str:
        """The digest of the row's calibration data; an error if the tokenizer or the data are missing."""
        name = json.dumps([_model_of(row), *_data_of(row), sampling.default])
        if name not in self.data:
            data = data_of(self.source(row), row.data or row.calib, sampling)
            if data.missing:
                raise CalibrationError(f"scheme {row.quant} needs statistics of activations: {data.missing}")
            self.data[name] = data.digest
        return self.data[name]


def _model_of(row: Row) -> str:
    return json.dumps(
        [row.model, row.config, row.tokenizer, row.base, row.adapter, row.rotate], sort_keys=True, default=str
    )


def _data_of(row: Row) -> tuple[str | None, int | str | None, int | None, str | None]:
    """What a row calibrates with, and how rows are cut from it."""
    return (row.data or row.calib, row.samples, row.sequence, row.field)


def _plan(row: Row, opened: _Opened, engine: Engine) -> PlannedRow:
    source = opened.source(row)
    request = replace(request_of(row), out=_staging_path(row, engine))
    resolved, found = resolve_ahead(source, request, engine.here)
    statistics: tuple[str, ...] = ()
    if engine.here and resolved.uncalibrated:
        assert resolved.scheme
        check_device(resolved.scheme, row.device)
        sampling = replace(sampling_of(row), default=found.samples if found else default_samples(resolved.scheme))
        schemes = [one.scheme for one in found.rules] if found else [resolved.scheme]
        statistics = (*(scheme.digest for scheme in schemes), opened.data_digest(row, sampling))
    values = sum(spec.size for spec in source.specs.values())
    stored = sum(spec.nbytes for spec in source.specs.values())
    stream = FRESH + load_target(row.target).base_memory + resolved.memory
    runs = row.verify and source.can_run and (resolved.uncalibrated or load_target(row.target).runs)
    return PlannedRow(
        row=row,
        digest=resolved.plan.digest,
        fingerprint=source.fingerprint,
        memory=max(stream, process_memory(values * RUN_BYTES_PER_VALUE) if runs else 0),
        least=max(stream, FRESH + FRAMEWORKS + stored if resolved.uncalibrated else 0),
        disk=resolved.disk,
        bytes=resolved.plan.disk,
        work=stored + resolved.plan.disk,
        values=values,
        key=_key(row, resolved, found) if resolved.uncalibrated else "",
        statistics=statistics,
        calibration=resolved.calibration.digest if resolved.calibration else "",
        measured=partial(digest_as_measured, source, request) if found else None,
        side_files=tuple((name, content_digest(source.side_files[name])) for name in resolved.plan.side_files),
    )


def _plan_chain(row: Row, path: str) -> PlannedRow:
    """Check the steps of a chain; its process takes what the largest step takes."""
    from bridge.workflows.chain.check import check_steps
    from bridge.workflows.chain.read import read_steps, refuse
    from bridge.workflows.chain.result import ChainReport

    problems = Problems()
    steps = read_steps(Path(path), Path(row.out), problems)
    checked = check_steps(steps, problems, row.overwrite, row.resume)
    refuse(Path(path), problems)
    left = [one for one in checked.values() if not one.kept]
    memory = FRESH + FRAMEWORKS + max((one.memory for one in left), default=0)
    disk = sum(one.disk for one in left)
    done = ChainReport(tuple(one.kept for one in checked.values() if one.kept))
    return PlannedRow(
        row=row,
        digest=checked[steps[-1].name].digest,
        memory=memory,
        least=memory,
        disk=disk,
        bytes=disk,
        work=disk + sum(one.memory for one in left),
        kept=None if left else replace(outcome_of_chain(row.name, done), kept=True),
    )


def _staging_path(row: Row, engine: Engine) -> Path:
    """The local directory of the row's output; an error if the output cannot be uploaded to its address."""
    if is_remote(row.out):
        if not engine.sends:
            raise UsageError(
                f"out={shown(row.out)}: with Ray, set `out` to a directory that all machines see; upload it afterwards"
            )
        check_out(row.out)
    return staging_path(row.out)


def _key(row: Row, resolved: ResolvedRequest, found: Candidates | None) -> str:
    """A digest of what decides the statistics: model, scheme or rules, data, tokenizer, device, package versions."""
    source, scheme = resolved.source, resolved.scheme
    assert scheme
    files = sorted((name, content_digest(content)) for name, content in source.side_files.items())
    given, *sampling = _data_of(row)
    data = content_digest(Path(given)) if given and Path(given).is_file() else given
    parts = [versions(), source.fingerprint, files, row.tokenizer, scheme.name, scheme.digest, data, sampling]
    parts += [row.device, *([row.compute] if row.compute else [])]
    parts += [found.name, [(one.name, one.scheme.digest) for one in found.rules]] if found else []
    return _digest(json.dumps(parts, sort_keys=True).encode())


def content_digest(content: Path | bytes) -> str:
    """A digest of a file's first bytes and its length: enough to tell texts apart, and fast for large files."""
    if isinstance(content, bytes):
        return _digest(content)
    with content.open("rb") as file:
        return _digest(file.read(DIGESTED) + str(content.stat().st_size).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
