"""The stream: runs a plan's steps under a byte budget on threads, each tensor straight to its place.

Every step reads one source tensor, checks it, smooths it, lays it out, quantizes it, and writes its outputs. Steps
share nothing, so the bytes do not depend on the number of threads. No number that is not finite, and no zero scale,
leaves.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.container import layout
from bridge.dtypes import DTYPES
from bridge.errors import SourceError, WriteError
from bridge.planning import Plan, Step, working_set
from bridge.quant.bits import FLOATS, amax, cast, matrix, smooth
from bridge.quant.encode import encode
from bridge.quant.smoothing import pre_scale, stored
from bridge.sources import lazy
from bridge.values import Format, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion
    from bridge.sources import Source


# What rounds to infinity: the middle between the largest number and what would follow it.
OVERFLOW = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}


@dataclass
class TensorFile:
    """One safetensors file whose layout is known before its first byte; tensors are written in any order."""

    path: Path
    specs: Mapping[str, TensorSpec]
    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def create(self) -> None:
        """Write the header and reserve all bytes, so that a full disk is found before the work."""
        header, self.offsets, self.size = layout(self.specs.values())
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            _reserve(fd, max(self.size, 1))
            os.pwrite(fd, header, 0)
        finally:
            os.close(fd)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write one tensor's storage array."""
        spec = self.specs[name]
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if len(data) != spec.nbytes:
            raise WriteError(
                f"{name}: the plan has {spec.nbytes} bytes of {spec.dtype} {spec.shape}, the step made {len(data)}"
            )
        fd = os.open(self.path, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], self.offsets[name] + done)
        finally:
            os.close(fd)


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)  # some network file systems reserve nothing


@dataclass
class Streamed:
    """What a run leaves to tell: tensor -> its policy, sharing group -> its largest over its smallest amax."""

    policies: dict[str, str] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step, told: Mapping[str, Any]) -> None:
        """Take in what one step had to tell; it survives a kill in the journal."""
        if "policy" in told:
            self.policies[step.source] = told["policy"]
        if "spread" in told and step.site:
            self.spreads[step.site.shares] = told["spread"]

    def notes(self) -> tuple[str, ...]:
        """The sharing groups in one sentence."""
        if not self.spreads:
            return ()
        worst = max(self.spreads.values())
        return (f"{len(self.spreads)} groups share one weight scale; their amax differed {worst:.2f} times at most",)


class Budget:
    """Bytes in use by running steps; a step larger than the budget runs alone."""

    def __init__(self, total: int) -> None:
        self._free, self._total = total, total
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """Wait until `nbytes` (at most the whole budget) are free, and return what was taken."""
        nbytes = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        return nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


def run(conversion: Conversion, path: Path, stop: threading.Event) -> Streamed:
    """Run all steps of the plan into one safetensors file at `path`; the first error, or `stop`, ends the run."""
    plan = conversion.plan
    file = TensorFile(path, {output.spec.name: output.spec for output in plan.outputs})
    file.create()
    streamed, peers = Streamed(), _peers(plan)
    budget = Budget(max(conversion.memory, 1))
    total, lock = sum(step.nbytes for step in plan.steps), threading.Lock()
    progressed = [0]

    def work(step: Step) -> None:
        if stop.is_set():
            return
        taken = budget.take(working_set(step, plan.sources))
        try:
            told = dict(conversion.work.done.get(_key(step)) or {})
            if _key(step) not in conversion.work.done:
                made = _make(step, conversion, peers, told)
                for output in step.outputs:
                    file.write(output.spec.name, made[output.part])
                del made
            with lock:
                streamed.add(step, told)
                conversion.work.mark(_key(step), told)
                progressed[0] += step.nbytes
                conversion.progress(progressed[0], total, "weights")
        except BaseException:
            stop.set()
            raise
        finally:
            budget.give(taken)

    _check_ties(conversion)
    with ThreadPoolExecutor(conversion.workers, thread_name_prefix="stream") as pool:
        futures = [pool.submit(work, step) for step in plan.steps]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
        for future in done:
            future.result()
    return streamed


def _check_ties(conversion: Conversion) -> None:
    """A tensor that the config ties and the checkpoint stores twice must be one tensor; SourceError where it is two."""
    for alias, canonical in conversion.plan.tied.items():
        if not {alias, canonical} <= set(conversion.plan.sources):
            continue
        one, other = (lazy(conversion.source, name).read() for name in (alias, canonical))
        if not np.array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}")):
            raise SourceError(
                f"{alias} and {canonical} differ, but the config ties them: which one is meant?\n"
                '  hint   "tie_word_embeddings": false in config.json, or in config=, keeps both'
            )


def _key(step: Step) -> str:
    return step.outputs[0].spec.name


def _peers(plan: Plan) -> dict[str, list[Step]]:
    """Sharing group -> its steps: their per-tensor amax is the group's maximum."""
    groups: dict[str, list[Step]] = {}
    for step in plan.quantized:
        if step.site and step.site.shares and step.format and _has_tensor_scale(step.format):
            groups.setdefault(step.site.shares, []).append(step)
    return groups


def _has_tensor_scale(format_: Format) -> bool:
    """True where some scale covers the whole weight: per tensor, NVFP4's global one, the second of W4A8."""
    first = format_.weight[0]
    return first.per == "tensor" or first.scale_dtype == "float8_e4m3fn" or len(format_.weight) == 2


def first_not_finite(source: Source) -> str:
    """The first float tensor of a source that holds NaN or infinity, "" where none does."""
    for name, spec in source.specs.items():
        try:
            if DTYPES[spec.dtype].floating:
                _finite_amax(lazy(source, name).read(), spec)
        except SourceError:
            return name
    return ""


def _make(
    step: Step, conversion: Conversion, peers: Mapping[str, list[Step]], told: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Part -> storage array, for every output of the step."""
    if step.attention:
        return _kv_scales(step, conversion)
    spec = conversion.plan.sources[step.source]
    bits = lazy(conversion.source, step.source).read()
    largest: float | None = _finite_amax(bits, spec) if DTYPES[spec.dtype].floating else 0.0
    if step.format is None or step.site is None:
        target = step.outputs[0].spec.dtype
        return {"weight": _cast(bits, spec, target, largest)}
    if largest == 0:
        told["policy"] = "all zero: scale 1, codes 0"
    made: dict[str, np.ndarray] = {}
    site, format_ = step.site, step.format
    if format_.prescales:
        assert conversion.calibration is not None
        scale = pre_scale(conversion.calibration, site.module, format_)
        graph_dtype = next(o.spec.dtype for o in step.outputs if o.part == "pre_quant_scale")
        made["pre_quant_scale"] = stored(scale, spec.dtype, graph_dtype)
        bits, largest = smooth(bits, spec.dtype, scale, layout=site.layout), None
    if site.shares in peers:
        largest = _shared_amax(step, conversion, peers, told)
    encoded = encode(
        bits, spec.dtype, format_.weight, layout=site.layout, transpose=step.transpose, amax=largest, name=step.source
    )
    made |= {"weight" if part == "codes" else part: array for part, array in encoded.items()}
    if len(format_.weight[0].block) == 2:  # the target's block scales have one axis: [in / block, out]
        out = next(o.spec.shape[1] for o in step.outputs if o.part == "scale")
        made["scale"] = made["scale"].repeat(format_.weight[0].block[0], axis=1)[:, :out]
    if any(output.part == "input_scale" for output in step.outputs):
        assert format_.input and conversion.calibration
        # NVFP4's global scale covers its FP8 block scales too: amax / (6 * 448)
        bound = format_.input.maxbound * (448.0 if format_.input.dynamic else 1.0)
        made["input_scale"] = _scale(conversion.calibration.input_amax[site.module], bound)
    return made


def _cast(bits: np.ndarray, spec: TensorSpec, target: str, largest: float | None) -> np.ndarray:
    """Round to the graph's dtype; SourceError where a value would become infinite."""
    if spec.dtype == target:
        return bits
    if largest is not None and largest >= OVERFLOW.get(target, float("inf")):
        raise SourceError(f"{spec.name}: {largest:g} does not fit {target}; choose another dtype (--dtype)")
    return cast(bits, spec.dtype, target)


def _finite_amax(bits: np.ndarray, spec: TensorSpec) -> float:
    """max |x| of the tensor; SourceError where it holds NaN or infinity."""
    if not bits.size:
        return 0.0
    if spec.dtype in FLOATS:
        flat = matrix(bits)
        largest = float(amax(flat, spec.dtype, *flat.shape)[0, 0])
    else:  # float64, fp8: rare and small, carried over as they are
        largest = float(np.abs(bits).max()) if spec.dtype == "float64" else 0.0
    if not np.isfinite(largest):
        raise SourceError(
            f"{spec.name}: holds NaN or infinity; nothing was written. Repair the checkpoint, or download it again"
        )
    return largest


def _shared_amax(step: Step, conversion: Conversion, peers: Mapping[str, list[Step]], told: dict[str, Any]) -> float:
    """The maximum over the tensors that share this step's scale; the others are read once more, never held together."""
    assert step.site
    specs = [conversion.plan.sources[peer.source] for peer in peers[step.site.shares]]
    amaxes = [_finite_amax(lazy(conversion.source, spec.name).read(), spec) for spec in specs]
    if min(amaxes) > 0:
        told["spread"] = max(amaxes) / min(amaxes)
    return max(amaxes)


def _kv_scales(step: Step, conversion: Conversion) -> dict[str, np.ndarray]:
    assert conversion.calibration and conversion.scheme and conversion.scheme.kv
    bound = conversion.scheme.kv.maxbound
    return {
        "k_scale": _scale(conversion.calibration.k_amax[step.attention], bound),
        "v_scale": _scale(conversion.calibration.v_amax[step.attention], bound),
    }


def _scale(largest: np.ndarray, maxbound: float) -> np.ndarray:
    scale = np.float32(largest) / np.float32(maxbound)
    assert np.isfinite(scale) and scale > 0, "the calibration's policies leave no zero and no NaN"
    return np.array(scale, np.float32)
