"""Read codes and scales that calibration chose off ModelOpt's model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.statistics import CODES, SCALES, Statistics
from bridge.core.values import Format, Structure
from bridge.quant.calibration import Provenance, of_expert
from bridge.quant.codec.packing import packed_codes
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import LiveSlice, Origin

PIECE = 4 << 20  # values of a weight that are coded at once
SAMPLED = 8  # rows of a weight that tell it from others; 0.3 GB of Llama-3.1-405B
EPSILON = 2.0**-24  # ModelOpt's fake quantizer codes blocks with no larger amax as zeros


def collect_codes(root: Any, bindings: Iterable[QuantizerBinding], origins: Mapping[str, Origin]) -> Statistics:
    """Return what calibration chose of the weights in `root`, by kind and checkpoint module.

    Codes lie in the axes of the stored weight. ModelOpt's modules hold their values, rounded to the model's dtype, and
    the amax of the blocks: a value divided by its scale is next to its code, so that rounding gives it back.
    """
    by_site: dict[str, list[QuantizerBinding]] = {}
    for binding in bindings:
        if binding.format.chosen:
            by_site.setdefault(binding.site.weight, []).append(binding)
    found: Statistics = {CODES: {}, SCALES: {}, "weight_amax": {}}
    for weight, own in by_site.items():
        site, form, names = own[0].site, own[0].format, [binding.module for binding in own]
        turned, origin = site.layout == "in_out", origins[weight]
        modules = [root.get_submodule(module_of(part, names)) for part in origin.parts]
        if form.compensated:
            found[CODES][site.module] = packed_nibbles(
                stored_axes([_codes_of(one, form) for one in modules], origin, turned)
            )
        if form.rescaled:
            scales = stored_axes([_scales_of(one, form) for one in modules], origin, turned)
            found[SCALES][site.module] = np.ascontiguousarray(
                (scales.T if turned else scales)[:, :: form.weight[0].block[0]]
            )
            amax = max(float(root.get_submodule(name).weight_quantizer.global_amax) for name in names)
            found["weight_amax"][site.module] = np.asarray(amax, np.float32)
    return found


def module_of(part: LiveSlice, modules: Sequence[str]) -> str:
    """The live module that has a part of a weight: a tied head is its own module."""
    live = part.live.rpartition(".")[0]
    return live if live in modules else modules[0]


def stored_axes(live: Sequence[np.ndarray], origin: Origin, turned: bool) -> np.ndarray:
    """Values of live matrices (out, in), as the checkpoint has them."""
    parts = [part.of(one.T if turned else one) for part, one in zip(origin.parts, live, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, origin.axis)


def _codes_of(module: Any, form: Format) -> np.ndarray:
    """The one-byte codes (out, in) of a live module's weight, some rows at a time."""
    import torch

    numeric, weight = form.weight[0], module.weight.detach()
    rows, cols = weight.shape
    codes = np.empty((rows, cols), np.int8)
    step = max(1, PIECE // cols)
    if form.rescaled:
        from bridge.calibration.algorithms.fp4 import codes_of

        scales = _block_scales(module).reshape(rows, -1)
        above = module.weight_quantizer.global_amax.float() / (6.0 * 448.0)
    else:
        amax = module.weight_quantizer._amax.detach().float().reshape(rows, -1)
        scales = torch.where(amax > EPSILON, numeric.maxbound / amax, torch.zeros_like(amax))
    for begin in range(0, rows, step):
        own = scales[begin : begin + step].float().repeat_interleave(numeric.block[0], dim=1)[:, :cols]
        part = weight[begin : begin + step].float()
        if form.rescaled:
            made = codes_of(part.abs() / (own * above).clamp(min=2.0**-149)) + 8 * (part < 0)
        else:
            made = (part * own).round_().clamp_(-numeric.maxbound - 1, numeric.maxbound)
        codes[begin : begin + step] = made.to(torch.int8).cpu().numpy()
    return codes


def _scales_of(module: Any, form: Format) -> np.ndarray:
    """The e4m3 code of each value's block (out, in)."""
    import torch

    rows, cols = module.weight.shape
    codes: np.ndarray = _block_scales(module).view(torch.uint8).reshape(rows, -1).cpu().numpy()
    return codes.repeat(form.weight[0].block[0], axis=1)[:, :cols]


def _block_scales(module: Any) -> Any:
    """The scales of blocks in e4m3, as ModelOpt's export makes them of a static quantizer's amax."""
    import torch

    quantizer = module.weight_quantizer
    scale = quantizer._amax.detach().float() / 6.0
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    largest = quantizer.global_amax.float() / 6.0
    scale = scale * 448.0 / torch.where(largest > 0, largest, torch.ones_like(largest))
    return scale.clamp_(2.0**-9, 448.0).to(torch.float8_e4m3fn)


def packed_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes to a byte along the last axis; of an odd number the last has the code 0 beside it."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return packed_codes(np.ascontiguousarray(codes).view(np.uint8), "int4", "in")


def with_weights_digest(
    provenance: Provenance, source: Source, structure: Structure, modules: Collection[str]
) -> Provenance:
    """Return a provenance that says for which weights the codes and scales of some modules were chosen."""
    return replace(provenance, weights=digest_of_weights(source, structure, modules)) if modules else provenance


def digest_of_weights(source: Source, structure: Structure, modules: Collection[str]) -> str:
    """Return a digest of some rows of the weight of each module, the first and the last among them.

    Codes are no statistics: a model of the same architecture that was trained on has others. Training, a merge or
    another seed changes every row; a check of all rows would read the whole model before the work.
    """
    digest = hashlib.sha256()
    known = frozenset(modules)
    chosen = (site for site in structure.sites if known & {site.module, of_expert(site.module, 0)})
    for name in sorted({site.weight for site in chosen}):
        digest.update(name.encode())
        last = source.specs[name].shape[0] - 1
        for row in dict.fromkeys(at * last // (SAMPLED - 1) for at in range(SAMPLED)):
            digest.update(np.ascontiguousarray(source.read_rows(name, row, row + 1)).tobytes())
    return digest.hexdigest()
