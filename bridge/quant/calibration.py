"""`Calibration`: the statistics of activations that a scheme needs, and a file to keep them in; never runs a model.

The file is safetensors: arrays under `input_amax/MODULE` and so on, provenance as JSON in the header. No time, no
machine and no path enters it: the same inputs give the same bytes. Module names are checkpoint names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from bridge.container import SafetensorsFile, file_bytes
from bridge.errors import BridgeError, CalibrationError, WriteError, fold_layers, reason
from bridge.json_data import parse_json
from bridge.quant.scheme import is_calibrated, is_static
from bridge.remote.place import as_path
from bridge.values import Format, Numeric

VERSION = "1"
_STATISTICS = ("input_amax", "smoothing_amax", "awq_scale", "pre_scale", "k_amax", "v_amax", "expert_tokens")
_SCALARS = ("input_amax", "k_amax", "v_amax")


@dataclass(frozen=True)
class Provenance:
    """Where a calibration comes from. `model` is a digest of architecture and tensor specs, not of the weights.

    `dtype` is the model's: statistics were taken in it, and are kept in float32, which holds all three exactly.
    """

    scheme: str
    scheme_digest: str
    architecture: str
    model: str
    dtype: str
    data_digest: str
    samples: int
    sequence: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Applied:
    """A policy that was applied: `what` of `module` was `case` ("zero", "never seen", "not finite")."""

    module: str
    what: str
    case: str
    policy: str
    value: float


@dataclass(frozen=True)
class HeldOut:
    """Inputs that calibration did not use, and what the models answered to the first batch.

    `quantized` is ModelOpt's fake-quantized model, `source` the model as it was: output 0 of each, its leading axes
    flattened, at `rows` and `columns` (a vocabulary is too wide to be kept whole); `quantized` has no columns where
    ModelOpt's kernels do not run. Perplexities are over all batches,
    None where the model has no next-token loss.
    """

    inputs: tuple[dict[str, np.ndarray], ...]
    rows: np.ndarray
    columns: np.ndarray
    source: np.ndarray
    quantized: np.ndarray
    source_perplexity: float | None = None
    quantized_perplexity: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Statistics by checkpoint module name, all float32.

    `input_amax` (): max |x| of the input; under SmoothQuant and W4A8 of the smoothed input, as ModelOpt rounds it.
    `smoothing_amax` (in,): max |x| per `in` before smoothing (ModelOpt's `_amax_for_smoothing`).
    `awq_scale` (in,): what the weight is multiplied by along `in` (ModelOpt's `awq_lite.best_scale`); the input is
    divided by it. `pre_scale` (in,): what the input is multiplied by and the weight divided by, where that does not
    follow from the two above (SmoothQuant with another alpha, modules that no token reached). `k_amax`, `v_amax` ():
    by attention module. `expert_tokens` (experts,): how many tokens each expert got, by the name of a layer's experts.
    """

    provenance: Provenance
    input_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    smoothing_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    awq_scale: Mapping[str, np.ndarray] = field(default_factory=dict)
    pre_scale: Mapping[str, np.ndarray] = field(default_factory=dict)
    k_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    v_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    expert_tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    applied: tuple[Applied, ...] = ()
    held_out: HeldOut | None = None

    def missing(
        self, formats: Mapping[str, Format | str], attention: Sequence[str] = (), kv: Numeric | None = None
    ) -> list[str]:
        """What the formats (by module) need and this calibration does not hold, layers folded; [] if it is enough."""
        lacks: dict[str, list[str]] = {}
        for module, form in formats.items():
            if not isinstance(form, Format) or not is_calibrated(form):
                continue
            smoothed = any(module in kind for kind in (self.smoothing_amax, self.awq_scale, self.pre_scale))
            if form.input is not None and is_static(form.input):
                if module not in self.input_amax:
                    lacks.setdefault("input amax", []).append(module)
                elif smoothed and not form.prescales:
                    lacks.setdefault("amax of the input before it was smoothed", []).append(module)
            known = {"smoothquant": self.smoothing_amax, "awq": self.awq_scale}.get(form.algorithm)
            if known is not None and module not in known and module not in self.pre_scale:
                lacks.setdefault(f"pre-scale of {form.algorithm}", []).append(module)
        if kv is not None and is_static(kv):
            for module in attention:
                if module not in self.k_amax or module not in self.v_amax:
                    lacks.setdefault("KV amax", []).append(module)
        return [f"{what}: {', '.join(fold_layers(names))}" for what, names in lacks.items()]

    def require(
        self, formats: Mapping[str, Format | str], attention: Sequence[str] = (), kv: Numeric | None = None
    ) -> None:
        """CalibrationError where `missing` is not empty."""
        if lacks := self.missing(formats, attention, kv):
            made = f"it was made for scheme {self.provenance.scheme} on {self.provenance.architecture}"
            raise CalibrationError("\n  ".join([f"the calibration lacks what the plan needs; {made}", *lacks]))

    def check(self) -> None:
        """CalibrationError where a statistic is not finite, not positive, or not float32 of its shape."""
        try:
            for kind in _STATISTICS:
                for module, array in getattr(self, kind).items():
                    _checked(f"{kind}/{module}", np.asarray(array), 0 if kind in _SCALARS else 1)
        except ValueError as cause:
            raise CalibrationError(f"the calibration cannot be used: {cause}") from cause

    @property
    def digest(self) -> str:
        """sha256 of what `save` writes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | Path) -> Path:
        """Write the sidecar; a reader sees the whole file or none."""
        data = self.to_bytes()
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as cause:
            raise WriteError(f"{path}: the calibration cannot be written: {reason(cause)}") from cause
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a sidecar and check every field of it; CalibrationError says what is wrong.

        >>> Calibration.load("fp8.safetensors").input_amax["model.layers.0.mlp.down_proj"]  # doctest: +SKIP
        """
        path = as_path(path)
        try:
            file = SafetensorsFile(path)
            arrays = {name: file.read(name) for name in file.specs}
        except BridgeError as cause:
            raise CalibrationError(f"{path}: not a calibration: {cause}") from cause
        try:
            return _parse(file.header.metadata, arrays)
        except (KeyError, TypeError, ValueError) as cause:
            raise CalibrationError(f"{path}: not a calibration that this version reads: {cause}") from cause

    def to_bytes(self) -> bytes:
        """The sidecar: what `save` writes."""
        return file_bytes(self._arrays(), self._metadata())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {f"{kind}/{name}": a for kind in _STATISTICS for name, a in sorted(getattr(self, kind).items())}
        if held := self.held_out:
            for at, batch in enumerate(held.inputs):
                arrays |= {f"held_out/inputs/{at}/{name}": a for name, a in sorted(batch.items())}
            arrays |= {f"held_out/{key}": getattr(held, key) for key in ("rows", "columns", "source", "quantized")}
        return {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}

    def _metadata(self) -> dict[str, str]:
        said: dict[str, Any] = {"provenance": asdict(self.provenance), "applied": [asdict(a) for a in self.applied]}
        if self.held_out:
            said["perplexity"] = [self.held_out.source_perplexity, self.held_out.quantized_perplexity]
        return {"qbridge.calibration": VERSION, "qbridge": json.dumps(said, sort_keys=True)}


def _parse(metadata: Mapping[str, str], arrays: dict[str, np.ndarray]) -> Calibration:
    if metadata.get("qbridge.calibration") != VERSION:
        found = metadata.get("qbridge.calibration")
        raise ValueError(f"version {found!r} where {VERSION!r} is expected")
    said = parse_json(metadata["qbridge"])
    if not isinstance(said["applied"], list):
        raise ValueError(f"applied = {said['applied']!r} where a list is expected")
    statistics: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _STATISTICS}
    held: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        kind, _, module = name.partition("/")
        if kind == "held_out":
            held[module] = array
        elif kind in statistics and module:
            statistics[kind][module] = _checked(name, array, 0 if kind in _SCALARS else 1)
        else:
            raise ValueError(f"unknown tensor {name!r}")
    return Calibration(
        provenance=Provenance(**_typed(Provenance, said["provenance"])),
        **statistics,
        applied=tuple(Applied(**_typed(Applied, row)) for row in said["applied"]),
        held_out=_held(held, said.get("perplexity")) if held else None,
    )


def _checked(name: str, array: np.ndarray, ndim: int) -> np.ndarray:
    if array.dtype != np.float32 or array.ndim != ndim or not array.size:
        raise ValueError(f"{name}: {array.dtype} {array.shape} where float32 of {ndim} axes is expected")
    # a channel that is always zero is left alone, and an expert may get no token; nothing else may be zero
    zero = name.startswith(("smoothing_amax/", "expert_tokens/"))
    least = np.float32(0) if zero else np.nextafter(np.float32(0), np.float32(1))
    if not np.isfinite(array).all() or (array < least).any():
        raise ValueError(f"{name}: holds a value that is not finite or not positive")
    return array


def _typed(kind: type, row: Any) -> dict[str, Any]:
    known = {f.name: str(f.type) for f in fields(kind)}
    if not isinstance(row, dict):
        raise ValueError(f"{kind.__name__} = {row!r} where an object is expected")
    if set(row) != set(known):
        raise ValueError(f"{kind.__name__} has the fields {sorted(row)} where {sorted(known)} are expected")
    types: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int)}
    for key, value in row.items():
        wanted = types.get(known[key], (dict,))
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{kind.__name__}.{key} = {value!r} where {known[key]} is expected")
        if isinstance(value, dict) and not all(isinstance(x, str) for pair in value.items() for x in pair):
            raise ValueError(f"{kind.__name__}.{key} must map strings to strings")
    return dict(row)


def _held(arrays: dict[str, np.ndarray], perplexity: Any) -> HeldOut:
    batches: dict[str, dict[str, np.ndarray]] = {}
    rest = dict(arrays)
    for name, array in arrays.items():
        if name.startswith("inputs/"):
            _, at, key = name.split("/", 2)
            batches.setdefault(at, {})[key] = array
            del rest[name]
    order = [str(at) for at in range(len(batches))]
    if set(rest) != {"rows", "columns", "source", "quantized"} or set(batches) != set(order):
        raise ValueError(f"held_out holds {sorted(arrays)}")
    shape = (rest["rows"].size, rest["columns"].size)
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"rows": ("int64", shape[:1]), "columns": ("int64", shape[1:])}
    if rest["quantized"].shape == (shape[0], 0):  # ModelOpt's model could not be run
        wanted["quantized"] = ("float32", (shape[0], 0))
    for name, array in rest.items():
        if (array.dtype.name, array.shape) != wanted.get(name, ("float32", shape)):
            raise ValueError(f"held_out/{name}: {array.dtype} {array.shape} does not fit {shape}")
    if not isinstance(perplexity, list) or len(perplexity) != 2:
        raise ValueError(f"perplexity = {perplexity!r}")
    if not all(p is None or (isinstance(p, float) and p > 0) for p in perplexity):
        raise ValueError(f"perplexity = {perplexity!r}")
    inputs = tuple(batches[at] for at in order)
    return HeldOut(inputs, **rest, source_perplexity=perplexity[0], quantized_perplexity=perplexity[1])
