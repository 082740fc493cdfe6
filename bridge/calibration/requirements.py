"""What a calibration needs: rows, data, device, dtype and time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.calibration.data import SAMPLES, Data, Sampling, check_compute
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.text import duration, number
from bridge.core.values import Format, Structure, main_dtype
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.memory import MemorySource
from bridge.sources.source import Delegate, Source

if TYPE_CHECKING:
    from bridge.calibration.job import CalibrationJob

# Rows by algorithm, if not `SAMPLES`. SmoothQuant needs the maximum of every channel: on tiny-llama (rows of 128
# tokens) the KL divergence of int8_sq is 0.0033 with 32 rows, 0.0018 with 128 and 0.0018 with 512. That of fp8 (max)
# stays between 0.0057 and 0.0058 from 2 to 512 rows, that of int4_awq between 0.0425 and 0.0447 from 2 to 64.
# That of int4_gptq is 0.0241 with 8 rows, 0.0207 with 32 and 0.0202 with 128 (other rows measured).
BY_ALGORITHM = {"smoothquant": 128}
ORDERED = 128  # of our GPTQ: with 4,096 tokens the KL of SmolLM2-135M scatters by 10 % from draw to draw

# Forwards of the whole data by algorithm. AWQ collects in the first, then runs each linear as it is and at 11 alphas.
# Clips are searched by products of elements, of 64 tokens of a batch: 75 times the time of 1,024 tokens' forward.
# Our GPTQ needs one forward, and products of inputs that take about as long.
FORWARDS = {
    "max": 1, "smoothquant": 1, "awq": 13, "awq_clip": 75, "awq_full": 88, "local_hessian": 2, "gptq": 3, "ordered": 2,
    "signround": 6,
}  # fmt: skip
STEP = 3  # of SignRound, in forwards of its rows: the way back takes two
STEP_ROWS = 8
FEW = 2048  # tokens, below which what SignRound learns holds for these alone
LONG = 600  # seconds, from which a user is warned
SLOW = 60  # seconds, from which another dtype is worth a line
# How many times as long as float32 a bfloat16 product takes on a CPU without its instructions, by one thread of an AMD
# EPYC on 128 x 1024 x 1024: with ONEDNN_MAX_CPU_ISA=AVX512_CORE 2.2 times, with ATEN_CPU_CAPABILITY=avx2 and without
# oneDNN, which takes none on such a CPU, 71 times. Other processors count as the first.
EMULATED = {True: 2.2, False: 71.0}  # by whether it has AVX-512
CPU_FACTS = Path("/proc/cpuinfo")
SMALL = 1e11  # FLOP that the slowest machine does within a minute or so; nothing is measured below
Rate = Callable[[str, str | None], float]


def default_samples(scheme: Scheme | None) -> int:
    """Return the number of rows for the algorithms of a scheme; the largest, if a recipe has several.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> default_samples(load_scheme("fp8")), default_samples(load_scheme("int8_sq"))
    (32, 128)
    """
    formats = [form for form in (scheme.formats if scheme else ()) if is_calibrated(form)]
    rows = (ORDERED if form.ordered else BY_ALGORITHM.get(form.algorithm, SAMPLES) for form in formats)
    return max(rows, default=SAMPLES)


def sampling_for(sampling: Sampling, scheme: Scheme | None) -> Sampling:
    """Return `sampling` with the default of the scheme."""
    return replace(sampling, default=default_samples(scheme))


def check_device(scheme: Scheme, device: str | None) -> None:
    """CalibrationError if CUDA is asked for or needed but absent; loads torch, no model."""
    check_device_name(device)
    if not (scheme.needs_cuda or is_cuda(device)):
        return
    import torch

    if torch.cuda.is_available():
        return
    why = scheme.needs_cuda or f"device={device!r} was asked for"
    raise CalibrationError(
        f"scheme {scheme.name}: no CUDA device here, and {why}; calibrate on a machine with one and pass its saved "
        "calibration (calib=), or choose another scheme"
    )


def is_cuda(device: str | None) -> bool:
    """Whether a device is CUDA's."""
    return str(device or "").startswith("cuda")


def check_device_name(device: str | None) -> None:
    """UsageError for a device that is neither the CPU nor CUDA."""
    if str(device or "cpu").partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; known: cpu, cuda, cuda:0 ...")


def check_device_here(device: str | None) -> None:
    """UsageError for a device that is unknown or not here; a CPU loads nothing."""
    check_device_name(device)
    name, _, index = str(device or "cpu").partition(":")
    if name != "cuda":
        return
    import torch

    count = torch.cuda.device_count()
    if not count or (index and not (index.isdecimal() and int(index) < count)):
        raise UsageError(
            f"device={device!r} (--device): {number(count, 'CUDA device')} here; "
            + (f"known: cuda:0 to cuda:{count - 1}" if count else "leave it out, to run on the CPU")
        )


def check_data(scheme: Scheme, data: Data) -> None:
    """CalibrationError if a scheme needs data and there are none."""
    if not data.batches and data.forward_loop is None and scheme.needs_calibration:
        raise CalibrationError(f"scheme {scheme.name} needs statistics of activations: {data.missing}")


def device_of(device: str | None, neighbour: int) -> str | None:
    """Return the device of a process; `neighbour`: its position among those of this machine.

    "cuda" is the process's own: LOCAL_RANK of torchrun, else its position. Ray and Slurm show each process one device.
    """
    if device != "cuda":
        return device
    import torch

    local = os.environ.get("LOCAL_RANK", "")
    index = int(local) if local.isdecimal() else neighbour
    return f"cuda:{index % max(1, torch.cuda.device_count())}"


def home_of(source: Source) -> str | None:
    """Return the device of a model in memory, where a walk runs unless another is asked for; None for other sources."""
    found = model_in_memory(source)
    return str(next(found.load_model().parameters()).device) if found else None


def source_for(source: Source, compute: str | None) -> Source:
    """Return a source whose model runs in `compute`, "fp32" or None for its own dtype; stored weights stay."""
    check_compute(compute)
    return source if compute is None else cast("Source", _InFloat32(source))


def model_in_memory(source: Source) -> MemorySource | None:
    """The model in memory that a source is, or runs in another dtype; None for other sources."""
    stored = source._source if isinstance(source, _InFloat32) else source
    return stored if isinstance(stored, MemorySource) else None


class _InFloat32(Delegate):
    """A source whose model has float32 weights of its own, with the values of the stored ones."""

    runs_in = "float32"

    def load_skeleton(self) -> Any:
        return self._source.load_skeleton().float()

    def load_model(self) -> Any:
        from bridge.calibration.modelopt import copy_modules

        return copy_modules(self._source.load_model()).float()


def has_bf16_instructions() -> bool:
    """Whether torch has fast bfloat16 on this CPU: AVX-512 BF16 or AMX on x86, BF16 on Arm; true if unknown."""
    import platform

    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return _of_arm(CPU_FACTS.read_text(encoding="utf-8") if CPU_FACTS.is_file() else "")
    asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return not all(asked) or any(ask() for ask in asked if ask)


def has_avx512() -> bool:
    """Whether this CPU has AVX-512; true if it is none of x86, or that is not known."""
    import platform

    import torch

    asked = getattr(torch.cpu, "_is_avx512_supported", None)
    return platform.machine().lower() not in ("x86_64", "amd64") or asked is None or bool(asked())


def _of_arm(facts: str) -> bool:
    """Whether Linux lists `bf16` among the features of an Arm processor; true for a text without features."""
    lines = [line.partition(":")[2].split() for line in facts.splitlines() if line.startswith("Features")]
    return not lines or "bf16" in lines[0]


def flops(job: CalibrationJob) -> float:
    """Return the FLOP of a calibration; see `flops_of`."""
    data = job.data
    tokens = _tokens(data.batches), _tokens(data.held_out)
    return flops_of(job.source, job.structure, job.scheme, *tokens, data.sequence)


def flops_of(
    source: Source, structure: Structure, scheme: Scheme, calibrated: int, held_out: int, sequence: int = 128
) -> float:
    """Return the FLOP of a calibration: 2 for each weight that a token meets, each token and each forward.

    `calibrated`, `held_out`: tokens, in rows of `sequence`. A token meets the experts that its router chooses.
    Attention and what is not a matrix are left out.
    """
    specs = source.specs
    formats = [scheme.format_of(site) for site in structure.sites]
    needing = [form for form in formats if isinstance(form, Format) and is_calibrated(form)]
    used = {"ordered" if form.ordered and not form.learned else form.algorithm for form in needing}
    passes = sum(FORWARDS.get(name, 1) for name in used) or 1
    tokens = passes * calibrated + 2 * held_out  # both models run on the latter
    compensated = {
        s.weight for s, form in zip(structure.sites, formats, strict=True) if getattr(form, "compensated", False)
    }
    if any(form.learned for form in scheme.formats):
        tokens += int(STEP * dict(scheme.options)["steps"]) * min(STEP_ROWS * sequence, calibrated)
    updates = sum(specs[name].size * specs[name].shape[-1] for name in compensated & {*specs})  # GPTQ's, by column
    return 2.0 * (_active(source, structure) * tokens + updates)


def _active(source: Source, structure: Structure) -> float:
    """Weights that one token is multiplied by; experts by their share of the tokens."""
    config = source.config
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, dict) else {})}
    chosen = config.get("num_experts_per_tok")
    layers: dict[int | None, set[int]] = {}
    for site in structure.sites:
        if site.expert is not None:
            layers.setdefault(site.layer, set()).add(site.expert)
    total = 0.0
    for weight, site in {site.weight: site for site in structure.sites if site.weight in source.specs}.items():
        shape = source.specs[weight].shape
        experts = shape[0] if site.stacked else len(layers[site.layer]) if site.expert is not None else 0
        share = chosen / experts if experts and isinstance(chosen, int) else 1.0
        total += prod(shape) * min(share, 1.0)
    return total


def _tokens(batches: Any) -> int:
    """Tokens of all batches; a sample without ids (an image) counts as one."""
    return sum(int(batch["input_ids"].numel()) if "input_ids" in batch else 1 for batch in batches)


def token_warnings(job: CalibrationJob) -> list[str]:
    """Return what a user should know of a GPTQ whose products of inputs have less than full rank."""
    ordered = [s for s in job.structure.sites if getattr(job.scheme.format_of(s), "ordered", False)]
    shapes = ((job.source.specs[s.weight].shape, s) for s in ordered if s.weight in job.source.specs)
    inputs = [(shape[-2 if site.layout.endswith("in_out") else -1], site) for shape, site in shapes]
    tokens = _tokens(job.data.batches)
    widest, site = max(inputs, key=lambda pair: pair[0], default=(0, None))
    if not site or not tokens or tokens >= widest:
        return []
    rows = -(-widest // (job.data.sequence or 1))
    rule = f"{job.scheme.name.partition(':')[0]}:imatrix" if ":" in job.scheme.name else "int4:imatrix"
    return [
        f"GPTQ needs at least as many tokens as a matrix has inputs: {site.module} has {widest:,}, and the data have "
        f"{tokens:,}; give samples={rows} (--samples {rows}) and data that have them, or use {rule}"
    ]


def time_warnings(job: CalibrationJob, rate: Rate | None = None) -> list[str]:
    """Return what a user should know before a calibration that takes long: its time, and what float32 would save.

    `rate`: FLOP per second of a dtype on a device; None measures it.
    """
    work, device, lines = flops(job), job.device, few_tokens(job)
    if work < SMALL:
        return lines
    measure = rate or measured_rate
    dtype = job.source.runs_in or main_dtype(job.source.specs.values())
    slow = dtype == "bfloat16" and str(device or "cpu").startswith("cpu") and not has_bf16_instructions()
    times = EMULATED[has_avx512()] if slow else 1.0
    speed = measure("float32" if slow else dtype, device) / times
    seconds = work / speed
    if seconds > LONG:
        lines.append(f"calibration: {duration(seconds)} ({work / 1e15:.3g} PFLOP at {speed / 1e12:.2g} TFLOP/s)")
    if slow and seconds > SLOW:
        lines.append(
            f'this CPU has no bfloat16 instructions: compute="fp32" (--compute fp32) would take '
            f"{duration(seconds / times)} instead of {duration(seconds)}, and twice the memory"
        )
    return lines


def few_tokens(job: CalibrationJob) -> list[str]:
    """Say that SignRound has too few tokens to learn from; empty if it has enough, or does not run."""
    learned, tokens = any(form.learned for form in job.scheme.formats), _tokens(job.data.batches)
    if not learned or tokens >= FEW or "input_ids" not in next(iter(job.data.batches), {}):
        return []
    return [
        f"SignRound learns from {tokens:,} tokens, too few for codes that fit other text: give {2 * FEW:,} or more "
        "(--samples, --sequence), or take int4:imatrix"
    ]


def measured_rate(dtype: str, device: str | None) -> float:
    """Measure FLOP per second of matrix products, for some 30 ms after a first one."""
    import torch

    cuda = is_cuda(device)
    rows, width = (4096, 4096) if cuda else (128, 1024)
    kind = getattr(torch, dtype)
    left = torch.ones(rows, width, dtype=kind, device=device)
    right = torch.ones(width, width, dtype=kind, device=device)

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    left @ right
    begin, count = wait(), 0
    while count == 0 or wait() - begin < 0.03:
        left @ right
        count += 1
    return 2.0 * rows * width * width * count / (wait() - begin)
