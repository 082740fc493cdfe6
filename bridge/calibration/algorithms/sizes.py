"""Bytes that GPTQ's Hessians, searches and chosen codes of matrices take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bridge.core.values import Format, Site, TensorSpec
from bridge.quant.schemes.scheme import Scheme

COPIES = 3  # of the largest Hessian, which ModelOpt's GPTQ inverts; and float32 copies of that weight
WEIGHT_COPIES = 6
EXPERTS = re.compile(r".*\.experts\.(?:(?P<number>\d+)\.|[^.]+$)")
LAYER = re.compile(r"(?:.*?\.)??\d+(?=\.)")


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in], or a stack of `count` such, by its checkpoint name. `forms`: the formats that it may get."""

    name: str
    out: int
    in_: int
    forms: tuple[Format, ...]
    count: int = 1


def block_of(name: str) -> str:
    """The layer that a tensor lies in, or its own name outside the layers."""
    match = LAYER.match(name)
    return match.group() if match else name


def matrices_of(specs: Mapping[str, TensorSpec], scheme: Scheme, sites: Sequence[Site] = ()) -> list[Matrix]:
    """Return the matrices that a scheme, bound to `sites`, quantizes; without sites all of the layers, as [out, in]."""
    if not sites:
        flat = [spec for spec in specs.values() if len(spec.shape) == 2 and LAYER.match(spec.name)]
        named = [spec for spec in flat if not EXPERTS.match(spec.name)]
        return [Matrix(spec.name, spec.shape[0], spec.shape[1], scheme.formats) for spec in named]
    found: dict[str, Matrix] = {}
    for site in sites:
        form, spec = scheme.format_of(site), specs.get(site.weight)
        if isinstance(form, Format) and spec and (len(spec.shape) == 2 or (site.stacked and form.ordered)):
            out, in_ = spec.shape[:-3:-1] if site.layout.endswith("in_out") else spec.shape[-2:]
            forms = found[site.weight].forms if site.weight in found else ()
            found[site.weight] = Matrix(site.weight, out, in_, (*forms, form), spec.shape[0] if site.stacked else 1)
    return [*found.values()]


def hessian_sizes(matrices: Iterable[Matrix]) -> tuple[dict[str, int], int]:
    """Return bytes of GPTQ's Hessians by block, and of the copies that ModelOpt makes for one matrix.

    ModelOpt collects those of all matrices in one run: float32 [in, in] each, also of matrices with the same input.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> hessian_sizes([Matrix("model.layers.3.mlp.up.weight", 2, 4, load_scheme("int4_gptq").formats)])
    ({'model.layers.3': 64}, 384)
    """
    sizes, copies = Counter[str](), 0
    for one in matrices:
        if any(form.compensated for form in one.forms):
            hessian = 4 * one.in_**2
            sizes[block_of(one.name)] += hessian * one.count
            copies = max(copies, COPIES * hessian + WEIGHT_COPIES * 4 * one.out * one.in_)
    return dict(sizes), copies


def codes_bytes(matrices: Iterable[Matrix]) -> int:
    """Return bytes of the codes and scales that calibration chooses: 4 bits, and 8 for a block of 16.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> codes_bytes([Matrix("model.layers.3.mlp.up.weight", 32, 64, load_scheme("nvfp4_gptq").formats)])
    1152
    """
    total = 0
    for one in matrices:
        total += one.count * one.out * -(-one.in_ // 2) * any(form.compensated for form in one.forms)
        total += one.count * one.out * -(-one.in_ // 16) * any(form.rescaled for form in one.forms)
    return total


def changed_values(matrices: Iterable[Matrix]) -> int:
    """Return how many weights calibration changes: the whole model's modules get copies of these.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> changed_values([Matrix("model.layers.3.mlp.up.weight", 32, 64, load_scheme("int4_awq").formats)])
    2048
    """
    return sum(one.out * one.in_ for one in matrices if any(form.changes_weights for form in one.forms))


def widest(matrices: Iterable[Matrix]) -> int:
    """Return the largest `in` of the matrices that are clipped, 0 without one."""
    return max((one.in_ for one in matrices if any(form.clipped for form in one.forms)), default=0)
