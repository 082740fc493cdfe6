"""Plans every row from headers before anything runs: what it makes, what it takes, which calibration it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.batches.job import failure, request_of
from bridge.batches.values import Engine, Outcome, Row
from bridge.errors import BridgeError, CalibrationError, SourceError, UsageError
from bridge.finish import RUN_BYTES_PER_VALUE, versions
from bridge.foreseen import Foreseen, foresee
from bridge.opening import data_of, open_model
from bridge.remote.address import is_remote, server_of, shown
from bridge.remote.opening import is_unreachable
from bridge.remote.outgoing import check_out, made_at
from bridge.targets import load_target

if TYPE_CHECKING:
    from bridge.sources import Source

# Measured with tiny-llama: a process that streams to `hf` takes 0.2 GB, one that calibrates 0.87, one that exports and
# runs as well 0.98. What weights take comes on top.
FRESH = 250 << 20
FRAMEWORKS = 800 << 20  # torch, transformers and ModelOpt
READ = 16 << 20  # bytes of a file that its digest covers; calibration reads less of a text


@dataclass(frozen=True)
class Planned:
    """A row with its plan, or with the outcome that it cannot have another one than.

    `memory`: bytes that its process is counted with; `least`: those without which it fails (without the others, only
    the comparison at the end does). `disk`: bytes, of which the plan counts `bytes`. `work`: bytes read and written.
    `values`: those of the model. `key`: of rows that calibrate, a digest of all that the statistics depend on; rows
    with one key share one calibration. `statistics`: digests of scheme and data that those are of, () where nobody
    looked. `calibration`: the digest of the one that was given. `side_files`: name and digest.
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
    runs: bool = False
    side_files: tuple[tuple[str, str], ...] = ()
    failed: Outcome | None = None


class Dead:
    """Servers that do not answer, each waited for once; never one that has answered: there only a read failed."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[str, Exception]] = {}  # the address that was asked for, and what came of it
        self._alive: set[str] = set()

    def check(self, url: str, kind: type[BridgeError]) -> None:
        """Raise a `kind` where the server of an address was waited for already."""
        if server_of(url) in self._asked:
            first, why = self._asked[server_of(url)]
            raise kind(
                f"{shown(url)}: its server does not answer, as for {first}; check the address and the network, and "
                "run again"
            ) from why

    def answered(self, url: str) -> None:
        """Remember that the server of an address answers."""
        self._alive.add(server_of(url))

    def note(self, url: str, error: Exception) -> None:
        """Remember the server of an address, if the error came of that it does not answer."""
        if (server := server_of(url)) not in {"", *self._alive} and is_unreachable(error):
            self._asked.setdefault(server, (shown(url), error))


def plan_rows(rows: Sequence[Row], engine: Engine, dead: Dead | None = None) -> list[Planned]:
    """Plan each row; one that cannot be planned is a failed one."""
    opened, planned = _Opened(dead or Dead()), []
    for row in rows:
        try:
            planned.append(_plan(row, opened, engine))
        except Exception as error:  # a bug costs its row, here as in a worker
            planned.append(Planned(row, failed=failure(row.name, error)))
    return planned


@dataclass
class _Opened:
    """What rows share while they are planned: headers are read once, and data are made into batches once.

    `failed`: why a model cannot be opened.
    """

    dead: Dead
    sources: dict[str, Source] = field(default_factory=dict)
    failed: dict[str, BridgeError] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)

    def source(self, row: Row) -> Source:
        name = _model_of(row)
        if name not in self.sources:
            if name in self.failed:
                raise self.failed[name]
            self.dead.check(row.model, SourceError)
            try:
                self.sources[name] = open_model(row.model, row.config, row.tokenizer)
            except BridgeError as error:
                self.failed[name] = error
                self.dead.note(row.model, error)
                raise
            self.dead.answered(row.model)
        return self.sources[name]

    def data_digest(self, row: Row) -> str:
        """The digest of what the row calibrates with; an error where a tokenizer or the data are missing."""
        name = json.dumps([_model_of(row), row.calib, row.samples, row.sequence])
        if name not in self.data:
            data = data_of(self.source(row), row.calib, row.samples, row.sequence)
            if data.missing:
                raise CalibrationError(f"scheme {row.quant} needs statistics of activations: {data.missing}")
            self.data[name] = data.digest
        return self.data[name]


def _model_of(row: Row) -> str:
    return json.dumps([row.model, row.config, row.tokenizer], sort_keys=True, default=str)


def _plan(row: Row, opened: _Opened, engine: Engine) -> Planned:
    source = opened.source(row)
    statistics: tuple[str, ...] = ()
    seen = foresee(source, replace(request_of(row), out=_made_at(row, engine)))
    if engine.here and seen.uncalibrated:
        from bridge.quant.modelopt import check_device

        assert seen.scheme
        check_device(seen.scheme, row.device)
        statistics = (seen.scheme.digest, opened.data_digest(row))
    values = sum(spec.size for spec in source.specs.values())
    stored = sum(spec.nbytes for spec in source.specs.values())
    stream = FRESH + load_target(row.target).base_memory + seen.memory
    runs = row.verify and source.can_run and (seen.uncalibrated or load_target(row.target).runs)
    return Planned(
        row=row,
        digest=seen.plan.digest,
        fingerprint=source.fingerprint,
        memory=max(stream, model_memory(values) if runs else 0),
        least=max(stream, FRESH + FRAMEWORKS + stored if seen.uncalibrated else 0),
        disk=seen.disk,
        bytes=seen.plan.disk,
        work=stored + seen.plan.disk,
        values=values,
        key=_key(row, seen) if seen.uncalibrated else "",
        statistics=statistics,
        calibration=seen.given.digest if seen.given else "",
        runs=seen.uncalibrated,
        side_files=tuple((name, content_digest(source.side_files[name])) for name in seen.plan.side_files),
    )


def _made_at(row: Row, engine: Engine) -> Path:
    """Where the row's output is made, if it can be sent where it says."""
    if is_remote(row.out):
        if not engine.sends:
            raise UsageError(
                f"out={shown(row.out)}: with Ray, rows go to a directory that all machines see; send it then"
            )
        check_out(row.out)
    return made_at(row.out)


def model_memory(values: int) -> int:
    """Bytes that a process takes to run a model of so many values, or to calibrate it: measured 5.5 a value of bf16."""
    return FRESH + FRAMEWORKS + values * RUN_BYTES_PER_VALUE


def _key(row: Row, seen: Foreseen) -> str:
    """What decides the statistics: model, scheme, data, tokenizer, device, and the versions of who computes them."""
    source, scheme = seen.source, seen.scheme
    assert scheme
    files = sorted((name, content_digest(content)) for name, content in source.side_files.items())
    data = row.calib and (content_digest(Path(row.calib)) if Path(row.calib).is_file() else row.calib)
    rows = [row.samples, row.sequence]
    said = [versions(), source.fingerprint, files, row.tokenizer, scheme.name, scheme.digest, data, rows, row.device]
    return _digest(json.dumps(said, sort_keys=True).encode())


def content_digest(content: Path | bytes) -> str:
    """A digest of a file: of its beginning and its length, which tell texts apart and cost no second of a large one."""
    if isinstance(content, bytes):
        return _digest(content)
    with content.open("rb") as file:
        return _digest(file.read(READ) + str(content.stat().st_size).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
