"""The report: what was written, how near it is to its source, what was skipped and why; printing is `bridge.show`."""

from __future__ import annotations

import dataclasses
import json
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
class Parity:
    """Per tensor and end to end; `passed` only if every gate passed. `not_run` says what could not be run, and why."""

    tensors: tuple[TensorParity, ...] = ()
    outputs: tuple[OutputParity, ...] = ()
    layers: tuple[tuple[str, float], ...] = ()  # module, relative L2 damage to its own output; largest first
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(t.passed for t in self.tensors) and all(o.passed for o in self.outputs)


@dataclass(frozen=True)
class Report:
    """What `convert` and `verify` return. `seconds` by stage, `bytes` of what the runtime loads, `peak_memory` (RSS).

    `skipped` maps what was not carried, quantized or run to its reason; `policies` maps tensors to the policy that
    replaced a zero, non-finite or never-seen amax.
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

    @property
    def passed(self) -> bool:
        """False when a parity gate failed or lint found an error; the command then exits with 3."""
        broken = any(finding.startswith("error") for finding in self.findings)
        return not broken and (self.parity is None or self.parity.passed)

    def to_json(self) -> str:
        """The report as JSON, `indent=2`; NaN never occurs in it."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2, allow_nan=False, default=str)

    def save(self, directory: Path) -> None:
        """Write `report.json` and `report.html` beside the model."""
        from bridge.show import html

        (directory / "report.json").write_text(self.to_json() + "\n")
        (directory / "report.html").write_text(html(self))

    def __rich__(self) -> Any:
        from bridge.show import report_table

        return report_table(self)
