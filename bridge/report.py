"""The report: what was written, how near it is to its source, what was skipped and why; printing is `bridge.show`.

What it says beyond parity is counted in `bridge.facts` and `bridge.tally`; nothing is computed here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TensorParity:
    """One weight, dequantized from the written file, against its source (both as float32, sums in float64).

    `cosine` and `norm_ratio` (written / source) are both gated: cosine alone is blind to a dropped scale. `sqnr` is in
    dB. `worst` is the largest relative L2 error of one block of 128 values along `in`.
    """

    name: str
    scheme: str
    cosine: float
    norm_ratio: float
    sqnr: float
    worst: float
    passed: bool

    @property
    def decibels(self) -> float:
        """`sqnr`; infinite where it is 999 (nothing lost) or -999 (nothing left): a report holds no infinity."""
        return self.sqnr if abs(self.sqnr) < 999 else math.copysign(math.inf, self.sqnr)


@dataclass(frozen=True)
class OutputParity:
    """Outputs of the written file, run, against a reference on held-out batches.

    `reference`: "source" (the unquantized model) or "modelopt" (ModelOpt's fake-quantized one). `relative_l2` is
    |written - reference| / |reference| over `positions` positions; `exact` is the share of positions that agree to
    1e-4: rounding flips a code here and there, and whatever follows it differs; a wrong graph agrees nowhere.
    Perplexities are None where the task has none.
    """

    reference: str
    positions: int
    cosine: float
    norm_ratio: float
    relative_l2: float
    exact: float
    perplexity: float | None
    reference_perplexity: float | None
    passed: bool


@dataclass(frozen=True)
class Count:
    """Something that holds for `n` of `of`: an invariant, counted."""

    what: str
    n: int
    of: int


@dataclass(frozen=True)
class ScaleRange:
    """Weight scales of one kind of tensor: `counts[i]` of those that were sorted lie from 2^(low + i) to twice that."""

    kind: str
    scales: int
    low: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Parity:
    """Per tensor and end to end; `passed` only if every gate passed. `not_run` says what could not be run, and why."""

    tensors: tuple[TensorParity, ...] = ()
    outputs: tuple[OutputParity, ...] = ()
    layers: tuple[tuple[str, float], ...] = ()  # module, relative L2 damage to its own output; largest first
    not_run: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    scales: tuple[ScaleRange, ...] = ()

    @property
    def passed(self) -> bool:
        return all(t.passed for t in self.tensors) and all(o.passed for o in self.outputs)


@dataclass(frozen=True)
class Storage:
    """Where the bytes of one kind of tensor went: `before` in the source, then in `codes` (or values) and `scales`."""

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
    """Input channels of one module whose amax is far above the median of all its channels, the largest first."""

    module: str
    median: float
    largest: float
    channels: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Coverage:
    """How many calibration tokens each expert of one layer got; `unseen` are those that got none."""

    module: str
    tokens: tuple[int, ...]

    @property
    def unseen(self) -> tuple[int, ...]:
        return tuple(expert for expert, count in enumerate(self.tokens) if not count)


@dataclass(frozen=True)
class Advice:
    """Modules that runtimes fuse, to leave unquantized together, and what that is expected to gain and to cost.

    `damage` is the relative L2 error of their outputs; `share` is their part of the summed squares of all damage;
    `bytes` is how much larger the model gets.
    """

    modules: tuple[str, ...]
    damage: float
    share: float
    bytes: int


@dataclass(frozen=True)
class Report:
    """What `convert` and `verify` return. `seconds` by stage, `bytes` of what the runtime loads, `peak_memory` (RSS).

    `skipped` maps what was not carried, quantized or run to its reason; `policies` maps tensors to the policy that
    replaced a zero, non-finite or never-seen amax. `made_from` is the provenance, `dtypes` has (dtype, bytes in the
    source, bytes written).

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
    parity: Parity | None = None
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

    @property
    def invariants(self) -> tuple[Count, ...]:
        """What was counted by the plan, and by the proof where there is one."""
        return self.counts + (self.parity.counts if self.parity else ())

    @property
    def passed(self) -> bool:
        """False when a parity gate failed or lint found an error; the command then exits with 3."""
        broken = any(finding.startswith("error") for finding in self.findings)
        return not broken and (self.parity is None or self.parity.passed)

    def to_json(self) -> str:
        """The report as JSON, `indent=2`; NaN never occurs in it."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2, allow_nan=False, default=str)

    def save(self, directory: Path) -> None:
        """Write `report.json` and `report.html` beside the model, and its section of the model card."""
        from bridge.card import add_section
        from bridge.show import html

        (directory / "report.json").write_text(self.to_json() + "\n")
        (directory / "report.html").write_text(html(self), encoding="utf-8")
        add_section(directory, self)

    def __rich__(self) -> Any:
        from bridge.show import report_table

        return report_table(self)


def report_from_dict(data: Mapping[str, Any]) -> Report:
    """The inverse of `Report.to_json`."""
    plain = {key: value for key, value in data.items() if key not in ("passed", "parity")}
    plain |= {key: tuple(plain[key]) for key in ("findings", "notes")}
    plain |= {key: _rows(kind, plain.get(key, ())) for key, kind in _ROWS.items()}
    plain["dtypes"] = tuple(tuple(row) for row in plain.get("dtypes", ()))
    parity = data["parity"]
    if parity is None:
        return Report(**plain)
    return Report(
        **plain,
        parity=Parity(
            tensors=_rows(TensorParity, parity["tensors"]),
            outputs=_rows(OutputParity, parity["outputs"]),
            layers=tuple((name, value) for name, value in parity["layers"]),
            not_run=tuple(parity["not_run"]),
            counts=_rows(Count, parity.get("counts", ())),
            scales=_rows(ScaleRange, parity.get("scales", ())),
        ),
    )


_ROWS = {"counts": Count, "storage": Storage, "outliers": Outliers, "experts": Coverage, "advice": Advice}


def _rows(kind: Any, rows: Any) -> tuple[Any, ...]:
    """Frozen rows of one kind; lists of JSON become tuples."""
    return tuple(kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)
