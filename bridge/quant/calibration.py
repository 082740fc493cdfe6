"""`Calibration`: the activation statistics that a scheme needs, and their file.

The file is safetensors: arrays named `input_amax/MODULE` and so on, provenance as JSON in the header. It contains no
time, machine or path, so the same inputs give the same bytes. Module names are checkpoint names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.arrays import np
from bridge.core.display import Displayed, Table
from bridge.core.errors import BridgeError, CalibrationError, WriteError, reason
from bridge.core.files.matrices import Matrix
from bridge.core.formats.safetensors import SafetensorsFile, file_pieces
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import parse_json
from bridge.core.parsing.typed_json import typed
from bridge.core.records import later
from bridge.core.remote.path import as_path
from bridge.core.text import fold, fold_layers, grouped, number, pattern
from bridge.core.values import Format, Numeric
from bridge.quant.schemes.scheme import is_calibrated, is_measured

VERSION = "1"
LOGITS = 1 << 28  # bytes of float32 logits of a batch of held-out rows, which has one at least
_STATISTICS = (
    "input_amax", "smoothing_amax", "awq_scale", "pre_scale", "k_amax", "v_amax", "weight_amax", "input_square",
    "weight_clip", "scale_factor", "learned_loss", "expert_tokens",
)  # fmt: skip
_MATRICES = ("weight_codes", "block_scales")  # as large as weights in four bits: they stay in their file
_MAY_BE_ZERO = ("smoothing_amax", "input_square", "expert_tokens", "weight_amax", "learned_loss")
_AXES = {
    "input_amax": 0,
    "k_amax": 0,
    "v_amax": 0,
    "weight_amax": 0,
    "weight_clip": 2,
    "scale_factor": 2,
}  # of the others 1


@dataclass(frozen=True)
class Provenance:
    """Where a calibration comes from. `model` is a digest of architecture and tensor specs, not of the weights.

    `dtype` is the model's: statistics are taken in it and stored as float32, which represents all three dtypes exactly.
    `chosen`: why so many samples, if samples="auto" chose them. `weights`: a digest of the weights that codes were
    chosen for, `codes`: the formats that they were chosen in (`describe.chosen_words`); both "" without such codes.
    `rule`: why this scheme, if a name such as int4:best chose it by measurement. `smoothed`: the codes that AWQ
    searched its pre-scales for (`describe.smoothed_words`). `rotation`: that of the model's weights, "" for none.
    `text`: what the data are, in words.
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
    chosen: str = ""
    weights: str = ""
    codes: str = ""
    rule: str = ""
    smoothed: str = ""
    rotation: str = later("")
    text: str = later("")


@dataclass(frozen=True)
class Applied:
    """An applied policy: `what` of `module` was `case` ("zero", "never seen", "not finite")."""

    module: str
    what: str
    case: str
    policy: str
    value: float


@dataclass(frozen=True)
class HeldOut:
    """Inputs that calibration did not use, and the models' outputs for the first batch.

    `quantized` is of ModelOpt's fake-quantized model, `source` of the original: output 0, its leading axes flattened,
    at `rows` and `columns` (a vocabulary is too wide to store whole). `quantized` has no columns if ModelOpt's kernels
    do not run. Perplexities are over all batches, None if the model has no next-token loss. `windows`: token ids of
    longer pieces of the same text, which outputs are evaluated on, -1 - id of tokens that do not count; () where the
    text has none beside its rows.
    """

    inputs: tuple[dict[str, np.ndarray], ...]
    rows: np.ndarray
    columns: np.ndarray
    source: np.ndarray
    quantized: np.ndarray
    source_perplexity: float | None = None
    quantized_perplexity: float | None = None
    windows: tuple[tuple[int, ...], ...] = ()

    @property
    def predictions(self) -> int:
        """The tokens that the perplexities are of: those that have one before them, without padding."""
        count = 0
        for batch in self.inputs:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            mask = np.ones(ids.shape, bool) if mask is None or mask.ndim > 2 else mask.astype(bool)
            count += int((mask[:, 1:] & mask[:, :-1]).sum())
        return count


def of_expert(module: str, number: int | None) -> str:
    """The name under which a statistic of one expert of a stack is found; without a number that of the module."""
    return module if number is None else f"{module}.{number}"


@dataclass(frozen=True, repr=False)
class Calibration(Displayed):
    """Statistics by checkpoint module name, all float32, and the codes and scales that calibration computed.

    `input_amax` (): max |x| of the input; under SmoothQuant and W4A8 of the smoothed input, as ModelOpt rounds it.
    `smoothing_amax` (in,): max |x| per `in` before smoothing (ModelOpt's `_amax_for_smoothing`).
    `awq_scale` (in,): factor of the weight along `in` (ModelOpt's `awq_lite.best_scale`); the input is divided by it.
    `pre_scale` (in,): factor of the input, by which the weight is divided, if it does not follow from the two above
    (SmoothQuant with another alpha, modules that no token reached). `k_amax`, `v_amax` (): by attention module.
    `input_square` (in,): mean of x^2 of the input over the tokens that reached it: llama.cpp's importance matrix; of
    each expert of a stack (`of_expert`).
    `weight_clip` (out, blocks): the part of its amax that the scale of each block of the weight covers, 1 for all.
    `scale_factor` (out, blocks): what SignRound multiplies the searched scale of each block by.
    `learned_loss` (2,): the sum of squared errors of a layer's output before and after SignRound, by its live name.
    `expert_tokens` (experts,): tokens that each expert received, by the name of a layer's experts.
    `weight_codes` (rows, columns / 2): the codes that GPTQ or SignRound chose, in the axes of the stored weight, two to
    a byte, the even column's in the low nibble. They lie in the file of this calibration, and are read by rows.
    `block_scales` (out, blocks): the e4m3 codes of the scales of a weight's blocks that its local Hessian, or GPTQ,
    chose, read in the same way. `weight_amax` (): max |w| of the modules that share the scale above those blocks.
    """

    provenance: Provenance
    input_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    smoothing_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    awq_scale: Mapping[str, np.ndarray] = field(default_factory=dict)
    pre_scale: Mapping[str, np.ndarray] = field(default_factory=dict)
    k_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    v_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    input_square: Mapping[str, np.ndarray] = field(default_factory=dict)
    weight_clip: Mapping[str, np.ndarray] = field(default_factory=dict)
    scale_factor: Mapping[str, np.ndarray] = field(default_factory=dict)
    learned_loss: Mapping[str, np.ndarray] = field(default_factory=dict)
    expert_tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    weight_codes: Mapping[str, Matrix] = field(default_factory=dict)
    block_scales: Mapping[str, Matrix] = field(default_factory=dict)
    weight_amax: Mapping[str, np.ndarray] = field(default_factory=dict)
    applied: tuple[Applied, ...] = ()
    held_out: HeldOut | None = None

    def lines(self) -> list[str]:
        """What it was made for, and on what."""
        of = self.provenance
        head = f"calibration of {of.architecture} for {of.scheme}: {of.samples} sequences of {of.sequence} tokens"
        modules = len({name for kind in (*_STATISTICS, *_MATRICES) for name in getattr(self, kind)})
        more = [f"samples chosen: {of.chosen}"] if of.chosen else []
        more += [of.rule] if of.rule else []
        more += [f"{number(len(self.applied), 'policy', 'policies')} applied"] if self.applied else []
        perplexity = ""
        if (held := self.held_out) and held.source_perplexity and held.quantized_perplexity:
            figures = f"{held.source_perplexity:.2f} -> {held.quantized_perplexity:.2f}"
            perplexity = f"; perplexity {figures} of {number(held.predictions, 'token')} held out"
        more += [self.learned.partition(":")[0]] if self.learned else []
        return [head, f"statistics of {number(modules, 'module')}{perplexity}", *more]

    @property
    def learned(self) -> str:
        """What SignRound left of the squared error of the outputs, of all layers and of each; "" if it did not run."""
        if not self.learned_loss:
            return ""
        before, after = (sum(float(loss[at]) for loss in self.learned_loss.values()) for at in (0, 1))
        each = ", ".join(f"{name} {loss[1] / max(loss[0], 1e-30):.0%}" for name, loss in self.learned_loss.items())
        layers = number(len(self.learned_loss), "layer")
        left = f"SignRound left {after / max(before, 1e-30):.0%} of the squared error of the outputs of {layers}"
        return f"{left} under the codes of GPTQ: {each}"

    def table(self) -> Table:
        """Each statistic with its range over the modules, layers folded."""
        rows = []
        for kind in _STATISTICS[:-1]:  # the last one is no range but counts
            for group in grouped(getattr(self, kind).items(), lambda item: pattern(f"{item[0]}.")):
                low, high = min(a.min() for _, a in group), max(a.max() for _, a in group)
                module = fold([f"{name}." for name, _ in group])[:-1]
                rows.append((kind, module, str(len(group)), f"{low:.4g}", f"{high:.4g}"))
        return ("statistic", "module", "n", "least", "largest"), rows

    def missing(
        self, formats: Mapping[str, Format | str], attention: Sequence[str] = (), kv: Numeric | None = None
    ) -> list[str]:
        """The statistics that formats (by module) need and this calibration lacks, layers folded."""
        lacking: dict[str, list[str]] = {}
        for module, form in formats.items():
            if not isinstance(form, Format) or not is_calibrated(form):
                continue
            for what, lacks in self._lacks(module, form).items():
                if lacks:
                    lacking.setdefault(what, []).append(module)
        for module in attention if is_measured(kv) else ():
            if module not in self.k_amax or module not in self.v_amax:
                lacking.setdefault("KV amax", []).append(module)
        return [f"{what}: {', '.join(fold_layers(names))}" for what, names in lacking.items()]

    def _lacks(self, module: str, form: Format) -> dict[str, bool]:
        """Each statistic that a format may need, and whether this calibration lacks it of a module."""
        scales = {"smoothquant": self.smoothing_amax, "awq": self.awq_scale, "awq_full": self.awq_scale}
        prescaled = (scales.get(form.algorithm, {}), self.pre_scale)
        smoothed = any(module in kind for kind in (self.smoothing_amax, self.awq_scale, self.pre_scale))
        seen, names = module in self.input_amax, (module, of_expert(module, 0))

        def lacks(kind: Mapping[str, Any]) -> bool:
            return not any(name in kind for name in names)

        return {
            "input amax": is_measured(form.input) and not seen,
            "amax of the input before smoothing": is_measured(form.input) and seen and smoothed and not form.prescales,
            "mean square of the input (importance matrix)": form.weighted and lacks(self.input_square),
            "clip of the blocks of the weight": form.clipped and module not in self.weight_clip,
            "factor of the scales of the weight": form.learned and module not in self.scale_factor,
            f"codes chosen by {form.algorithm}": form.compensated and lacks(self.weight_codes),
            f"block scales chosen by {form.algorithm}": form.rescaled
            and (lacks(self.block_scales) or module not in self.weight_amax),
            f"pre_quant_scale of {form.algorithm}": form.algorithm in scales
            and not any(module in kind for kind in prescaled),
        }

    def require(
        self, formats: Mapping[str, Format | str], attention: Sequence[str] = (), kv: Numeric | None = None
    ) -> None:
        """Raise CalibrationError if `missing` is not empty."""
        if lacking := self.missing(formats, attention, kv):
            origin = f"it was made for scheme {self.provenance.scheme} on {self.provenance.architecture}"
            raise CalibrationError("\n  ".join([f"the calibration lacks statistics of the plan; {origin}", *lacking]))

    def check(self) -> None:
        """Raise CalibrationError if a statistic is not finite, not positive, or not float32 of its shape."""
        try:
            for kind in _STATISTICS:
                for module, array in getattr(self, kind).items():
                    _checked(f"{kind}/{module}", np.asarray(array), _AXES.get(kind, 1))
            for kind in _MATRICES:
                for module, matrix in getattr(self, kind).items():
                    _checked_matrix(f"{kind}/{module}", matrix)
        except ValueError as cause:
            raise CalibrationError(f"the calibration cannot be used: {cause}") from cause

    @property
    def chosen(self) -> frozenset[str]:
        """The modules whose codes or scales it has."""
        return frozenset((*self.weight_codes, *self.block_scales))

    @property
    def digest(self) -> str:
        """sha256 of the file that `save` writes."""
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece)
        return digest.hexdigest()

    def save(self, path: str | Path) -> Path:
        """Write the file; a reader sees all of it or none."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self._pieces())
        except OSError as cause:
            raise WriteError(f"{path}: the calibration cannot be written: {reason(cause)}") from cause
        return path

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file and check every field; CalibrationError names what is wrong.

        >>> Calibration.load("fp8.safetensors").input_amax["model.layers.0.mlp.down_proj"]  # doctest: +SKIP
        """
        path = as_path(path)
        try:
            file = SafetensorsFile(path)
            matrices = {name for name in file.specs if name.partition("/")[0] in _MATRICES}
            arrays = {name: file.matrix(name) if name in matrices else file.read(name) for name in file.specs}
        except BridgeError as cause:
            raise CalibrationError(f"{path}: not a calibration: {cause}") from cause
        try:
            return _parse(file.header.metadata, arrays)
        except (KeyError, TypeError, ValueError) as cause:
            raise CalibrationError(f"{path}: not a calibration that this version reads: {cause}") from cause

    def to_bytes(self) -> bytes:
        """The file that `save` writes."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        matrices = {f"{kind}/{name}": m for kind in _MATRICES for name, m in sorted(getattr(self, kind).items())}
        return file_pieces({**self._arrays(), **matrices}, self._metadata())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {f"{kind}/{name}": a for kind in _STATISTICS for name, a in sorted(getattr(self, kind).items())}
        if held_out := self.held_out:
            for at, batch in enumerate(held_out.inputs):
                arrays |= {f"held_out/inputs/{at}/{name}": a for name, a in sorted(batch.items())}
            arrays |= {f"held_out/{key}": getattr(held_out, key) for key in ("rows", "columns", "source", "quantized")}
            if held_out.windows:
                arrays["held_out/windows"] = np.array(held_out.windows, np.int64)
        return {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}

    def _metadata(self) -> dict[str, str]:
        optional = ("chosen", "weights", "codes", "rule", "smoothed", "rotation")
        provenance = {name: value for name, value in asdict(self.provenance).items() if name not in optional or value}
        header: dict[str, Any] = {"provenance": provenance, "applied": [asdict(a) for a in self.applied]}
        if self.held_out:
            header["perplexity"] = [self.held_out.source_perplexity, self.held_out.quantized_perplexity]
        return {"qbridge.calibration": VERSION, "qbridge": json.dumps(header, sort_keys=True)}


def _parse(metadata: Mapping[str, str], arrays: Mapping[str, Any]) -> Calibration:
    if metadata.get("qbridge.calibration") != VERSION:
        raise ValueError(f"version {metadata.get('qbridge.calibration')!r}; expected {VERSION!r}")
    header = parse_json(metadata["qbridge"])
    if not isinstance(header["applied"], list):
        raise ValueError(f"applied = {header['applied']!r}; expected a list")
    statistics: dict[str, dict[str, Any]] = {kind: {} for kind in (*_STATISTICS, *_MATRICES)}
    held_out: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        kind, _, module = name.partition("/")
        if kind == "held_out":
            held_out[module] = array
        elif kind in _MATRICES and module:
            statistics[kind][module] = _checked_matrix(name, array)
        elif kind in statistics and module:
            statistics[kind][module] = _checked(name, array, _AXES.get(kind, 1))
        else:
            raise ValueError(f"unknown tensor {name!r}")
    said = header["provenance"]
    return Calibration(
        provenance=typed(
            Provenance,
            {"chosen": "", "weights": "", "codes": "", "rule": "", "smoothed": "", **said}
            if isinstance(said, dict)
            else said,
        ),
        **statistics,
        applied=typed(tuple[Applied, ...], header["applied"]),
        held_out=_parse_held_out(held_out, header.get("perplexity")) if held_out else None,
    )


def _checked(name: str, array: np.ndarray, ndim: int) -> np.ndarray:
    if array.dtype != np.float32 or array.ndim != ndim or not array.size:
        raise ValueError(f"{name}: {array.dtype} {array.shape}; expected float32 of {ndim} axes")
    # a channel may always be zero, and an expert may receive no token; nothing else may be zero
    zero = name.partition("/")[0] in _MAY_BE_ZERO
    least = np.float32(0) if zero else np.nextafter(np.float32(0), np.float32(1))
    if not np.isfinite(array).all() or (array < least).any():
        raise ValueError(f"{name}: contains a value that is not finite or not positive")
    if name.startswith("weight_clip/") and (array > 1).any():
        raise ValueError(f"{name}: contains a value above 1")
    return array


def _checked_matrix(name: str, matrix: Matrix) -> Matrix:
    if matrix.dtype != np.uint8 or len(matrix.shape) != 2 or not matrix.nbytes:
        raise ValueError(f"{name}: {matrix.dtype} {matrix.shape}; expected uint8 of 2 axes")
    return matrix


def _parse_held_out(arrays: dict[str, np.ndarray], perplexity: Any) -> HeldOut:
    batches: dict[str, dict[str, np.ndarray]] = {}
    rest = dict(arrays)
    for name, array in arrays.items():
        if name.startswith("inputs/"):
            _, at, key = name.split("/", 2)
            batches.setdefault(at, {})[key] = array
            del rest[name]
    windows = rest.pop("windows", np.empty((0, 0), np.int64))
    if (windows.dtype.name, windows.ndim) != ("int64", 2):
        raise ValueError(f"held_out/windows: {windows.dtype} {windows.shape}; expected int64 of 2 axes")
    order = [str(at) for at in range(len(batches))]
    if set(rest) != {"rows", "columns", "source", "quantized"} or set(batches) != set(order):
        raise ValueError(f"held_out contains {sorted(arrays)}")
    shape = (rest["rows"].size, rest["columns"].size)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"rows": ("int64", shape[:1]), "columns": ("int64", shape[1:])}
    if rest["quantized"].shape == (shape[0], 0):  # ModelOpt's model could not be run
        expected["quantized"] = ("float32", (shape[0], 0))
    for name, array in rest.items():
        if (array.dtype.name, array.shape) != expected.get(name, ("float32", shape)):
            raise ValueError(f"held_out/{name}: {array.dtype} {array.shape} does not fit {shape}")
    pair = isinstance(perplexity, list) and len(perplexity) == 2
    if not pair or not all(p is None or (isinstance(p, float) and p > 0) for p in perplexity):
        raise ValueError(f"perplexity = {perplexity!r}")
    inputs = tuple(batches[at] for at in order)
    return HeldOut(
        inputs, **rest, source_perplexity=perplexity[0], quantized_perplexity=perplexity[1],
        windows=tuple(map(tuple, windows.tolist())),
    )  # fmt: skip
