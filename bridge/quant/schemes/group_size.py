"""The size of INT4 blocks that divides every matrix.

ModelOpt's and vLLM's configuration names one size for the whole checkpoint, and no runtime pads a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bridge.core.errors import UsageError
from bridge.core.values import NARROW, Format, Numeric, Site, Structure, TensorSpec
from bridge.quant.schemes.scheme import Scheme

SIZES = (128, 64, 32)
NOTE = "{kind} blocks of {size} instead of {first}: {module} has in = {width}, and a checkpoint has one size"


def with_dividing_blocks(scheme: Scheme, structure: Structure, specs: Mapping[str, TensorSpec]) -> Scheme:
    """The scheme with the largest size that divides all of the model; unchanged if none does, or none has to.

    A recipe's rules name schemes too: their blocks have the same size.
    """
    if scheme.sized or not any(map(_has_blocks, scheme.formats)):
        return scheme
    widths = {
        site.module: width
        for site in structure.sites
        if isinstance(form := scheme.format_of(site), Format) and _has_blocks(form)
        if (width := _width(site, specs.get(site.weight)))
    }
    size = next((size for size in SIZES if all(width % size == 0 for width in widths.values())), SIZES[0])
    if size == SIZES[0]:
        return scheme
    module = next(module for module, width in widths.items() if width % SIZES[0])
    rules = tuple(replace(rule, format=_in_blocks(rule.format, size)) for rule in scheme.rules)
    kind = next(form.weight[0].dtype for form in scheme.formats if _has_blocks(form)).upper()
    note = NOTE.format(kind=kind, size=size, first=SIZES[0], module=module, width=widths[module])
    return replace(scheme, weight=_weight(scheme.weight, size), rules=rules, note=note)


def check_blocks(group: object, zero_points: object) -> None:
    """UsageError for a size that no block has, and for zero points that are not asked for by true or false."""
    if group is not None and (type(group) is not int or group not in SIZES):
        raise UsageError(f"group={group!r} (--group): blocks have 32, 64 or 128 values")
    if type(zero_points) is not bool:
        raise UsageError(f"zero_points={zero_points!r} (--zero-points): give True or False")


def with_group(scheme: Scheme, group: int | None) -> Scheme:
    """The scheme with blocks of `group` values in all of its integer weights; UsageError if it has no such blocks."""
    check_blocks(group, False)
    if group is None:
        return scheme
    if not any(_is_grouped(one) for form in scheme.formats for one in form.weight):
        raise UsageError(
            f"group={group} (--group): scheme {scheme.name} has no integer weights in blocks, as int4_wo and int4:gptq"
        )

    def sized(weight: tuple[Numeric, ...]) -> tuple[Numeric, ...]:
        return tuple(replace(one, block=(group,)) if _is_grouped(one) else one for one in weight)

    rules = tuple(
        replace(rule, format=rule.format and replace(rule.format, weight=sized(rule.format.weight)))
        for rule in scheme.rules
    )
    return replace(scheme, weight=sized(scheme.weight), rules=rules, sized=True)


def with_zero_points(scheme: Scheme, wanted: bool) -> Scheme:
    """The scheme with a zero point in each block of its INT4 weights; UsageError if it can have none."""
    if not wanted:
        return scheme
    own = [scheme.format, *(rule.format for rule in scheme.rules if rule.format)]
    if not any(map(_takes_zero_points, own)):
        raise UsageError(
            f"zero_points=True (--zero-points): scheme {scheme.name} has no INT4 weights in blocks whose scales follow "
            "from their values alone, as those of int4_wo and int4_awq do"
        )

    def shifted(form: Format) -> Format:
        weight = (replace(form.weight[0], zero_points=True), *form.weight[1:])
        return replace(form, weight=weight) if _takes_zero_points(form) else form

    rules = tuple(replace(rule, format=rule.format and shifted(rule.format)) for rule in scheme.rules)
    return replace(scheme, weight=shifted(scheme.format).weight, rules=rules)


def _takes_zero_points(form: Format) -> bool:
    """Whether the codes of a weight follow from the least and the largest value of a block."""
    first = form.weight[0]
    plain = form.algorithm in ("max", "awq") and not first.search and len(form.weight) == 1 and form.input is None
    return plain and _is_grouped(first) and first.dtype in ("int4", *NARROW)


def _is_grouped(numeric: Numeric) -> bool:
    """Whether a float scale covers each block of integers along `in`."""
    return numeric.dtype in ("int4", "int8", *NARROW) and len(numeric.block) == 1 and numeric.scale_dtype == "float32"


def _in_blocks(form: Format | None, size: int) -> Format | None:
    return form and replace(form, weight=_weight(form.weight, size))


def _weight(weight: tuple[Numeric, ...], size: int) -> tuple[Numeric, ...]:
    return tuple(replace(one, block=(size,)) if _is_shrunk(one) else one for one in weight)


def _has_blocks(form: Format) -> bool:
    return any(map(_is_shrunk, form.weight))


def _is_shrunk(numeric: Numeric) -> bool:
    return numeric.dtype in ("int4", *NARROW) and numeric.block == (SIZES[0],)


def _width(site: Site, spec: TensorSpec | None) -> int:
    """The extent `in` of a matrix; 0 for a convolution, which no target writes in blocks."""
    if spec is None or site.layout == "conv":
        return 0
    return spec.shape[-2] if site.layout in ("in_out", "stack_in_out") else spec.shape[-1]
