"""Estimate how long calibration takes, before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any

from bridge.calibration.compute import has_bf16_instructions
from bridge.calibration.data import FP32, Data
from bridge.core.text import duration
from bridge.core.values import Format, Structure, main_dtype
from bridge.quant.schemes.scheme import Scheme, is_calibrated
from bridge.sources.source import Source

# Forwards of the whole data by algorithm. AWQ collects in the first, then runs each linear as it is and at 11 alphas.
# Clips are searched by products of elements, of 64 tokens of a batch: 75 times the time of 1,024 tokens' forward.
FORWARDS = {"max": 1, "smoothquant": 1, "awq": 13, "awq_clip": 75, "awq_full": 88, "local_hessian": 2, "gptq": 3}
LONG = 600  # seconds, from which a user is told
SLOW = 60  # seconds, from which another dtype is worth a line
SMALL = 1e11  # FLOP that the slowest machine does within a minute or so; nothing is measured below
Rate = Callable[[str, str | None], float]


def flops(source: Source, structure: Structure, scheme: Scheme, data: Data) -> float:
    """Return the FLOP of a calibration: 2 for each weight that a token meets, each token and each forward.

    A token meets the experts that its router chooses. Attention and what is not a matrix are left out.
    """
    formats = [scheme.format_of(site) for site in structure.sites]
    used = {form.algorithm for form in formats if isinstance(form, Format) and is_calibrated(form)}
    passes = sum(FORWARDS.get(name, 1) for name in used) or 1
    tokens = passes * _tokens(data.batches) + 2 * _tokens(data.held_out)  # both models run on the latter
    chosen = {s.weight for s in structure.sites if getattr(scheme.format_of(s), "compensated", False)} & {*source.specs}
    updates = sum(source.specs[name].size * source.specs[name].shape[-1] for name in chosen)  # GPTQ's, by column
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


def told(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    device: str | None,
    compute: str | None,
    rate: Rate | None = None,
) -> list[str]:
    """Return what a user should know before a calibration that takes long: its time, and what float32 would save.

    `rate`: FLOP per second of a dtype on a device; None measures it.
    """
    work = flops(source, structure, scheme, data)
    if work < SMALL:
        return []
    measure = rate or measured_rate
    dtype = "float32" if compute == FP32 else main_dtype(source.specs.values())
    speed = measure(dtype, device)
    seconds, lines = work / speed, []
    if seconds > LONG:
        lines.append(f"calibration: {duration(seconds)} ({work / 1e15:.3g} PFLOP at {speed / 1e12:.2g} TFLOP/s)")
    slow = dtype == "bfloat16" and str(device or "cpu").startswith("cpu") and not has_bf16_instructions()
    if slow and seconds > SLOW and (faster := work / measure("float32", device)) < seconds / 1.5:
        lines.append(
            f'this CPU has no bfloat16 instructions: compute="fp32" (--compute fp32) would take {duration(faster)} '
            f"instead of {duration(seconds)}, and twice the memory"
        )
    return lines


def measured_rate(dtype: str, device: str | None) -> float:
    """Measure FLOP per second of matrix products, for some 30 ms after a first one."""
    import torch

    cuda = str(device or "").startswith("cuda")
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
