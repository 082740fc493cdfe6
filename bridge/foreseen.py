"""A conversion as arguments and headers tell it, before anything is written: plan, output, memory, given calibration.

What needs neither data nor a device to be refused is refused here, for `convert` and every row of a batch; reads no
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import CalibrationError, UsageError
from bridge.opening import plan_of, scheme_of, stored_of, structure_of
from bridge.progress import Progress, quiet
from bridge.remote.address import check_here
from bridge.remote.place import remote

if TYPE_CHECKING:
    from bridge.planning import Plan
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source
    from bridge.values import Format, Structure

SIDECAR = 16 << 20  # bytes of a calibration with its held-out answers: 4.2 MB of tiny-llama, which has every answer
# Bytes of card, page and settings, and of manifest, graph and report for each tensor: tiny-llama has 2.7 KB of them.
TEXTS, TEXT = 256 << 10, 4 << 10


@dataclass(frozen=True)
class Request:
    """What a caller asks of `convert`: its arguments, by their names and with their defaults."""

    model: Any
    target: str
    quant: Any = None
    out: str | Path | None = None
    calib: Any = None
    kv: str | None = None
    device: str | None = None
    config: Mapping[str, Any] | str | Path | None = None
    tokenizer: Any = None
    verify: bool = True
    overwrite: bool = False
    resume: bool = True
    progress: Progress = quiet
    memory: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Foreseen:
    """A conversion as headers tell it: planned, its output apart from its source, its memory enough for the stream."""

    source: Source
    structure: Structure
    scheme: Scheme | None
    plan: Plan
    out: Path
    given: Calibration | None
    memory: int

    @property
    def disk(self) -> int:
        """Bytes that it may take on disk."""
        calibrated = self.uncalibrated or self.given is not None
        return self.plan.disk + TEXTS + TEXT * len(self.plan.outputs) + SIDECAR * calibrated

    @property
    def uncalibrated(self) -> bool:
        """True where the scheme needs statistics that nobody gave: the model is run."""
        return self.scheme is not None and self.scheme.needs_calibration and self.given is None


def foresee(source: Source, request: Request) -> Foreseen:
    """What `convert` would do, as far as it follows from its arguments and the headers of the source."""
    from bridge.budget import stream_memory

    check_here(calib=request.calib)
    out, target = request.out, request.target
    structure = structure_of(source)
    scheme = scheme_of(request.quant, request.kv, structure) or stored_of(request.quant, source)
    plan_ = plan_of(source, structure, target, scheme, dict(request.options))
    directory = Path(out) if out is not None else Path(f"{source.name}-{plan_.scheme}-{target}")
    _check_apart(directory, source)
    budget = stream_memory(plan_, request.memory)
    given = _given_calibration(request.calib, source, structure, plan_, scheme)
    return Foreseen(source, structure, scheme, plan_, directory, given, budget)


def _check_apart(out: Path, source: Source) -> None:
    """Refuse to write over what is read."""
    root = getattr(source, "root", None)
    if root is not None and not remote(root) and Path(root).resolve() in (out.resolve(), *out.resolve().parents):
        raise UsageError(f"{out} is the source, or lies inside it: its files would be lost; choose another directory")


def _given_calibration(
    calib: Any, source: Source, structure: Structure, plan_: Plan, scheme: Scheme | None
) -> Calibration | None:
    """A `Calibration`, loaded if `calib` is the path of one, checked to hold every statistic that the plan needs."""
    from bridge.quant.calibration import Calibration
    from bridge.quant.modelopt import fingerprint

    if isinstance(calib, str | Path) and str(calib).endswith(".safetensors"):
        calib = Calibration.load(Path(calib))
    own = calib is None and scheme is not None and scheme.needs_calibration
    calib = source.calibration if own else calib  # quantized where it was trained
    if not isinstance(calib, Calibration):
        return None
    if scheme is None:
        raise UsageError("a calibration was given but no scheme: pass quant=")
    formats: dict[str, Format | str] = {s.site.module: s.format for s in plan_.quantized if s.site and s.format}
    attention = [step.attention for step in plan_.steps if step.attention]
    if own and calib.missing(formats, attention, scheme.kv):
        return None
    if (made_for := calib.provenance.model) and made_for != fingerprint(structure, source):
        raise CalibrationError(
            f"the calibration was made for another model ({calib.provenance.architecture}): its tensors differ from "
            f"those of {source.where} in name, shape or dtype; calibrate this one"
        )
    calib.require(formats, attention, scheme.kv)
    calib.check()
    return calib
