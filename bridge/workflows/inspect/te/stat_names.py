"""Names of statistics in a config: parse and check.

A statistic of a tensor is a word, or {max_blockwise_dynamic_range: {block_size: 32, dims: 1}}. One of quantization is
[SCHEME_]STAT[_columnwise], where SCHEME is a scheme of `mappings/schemes` or a recipe of TransformerEngine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from bridge.core.errors import UsageError
from bridge.core.text import described, nearest
from bridge.quant.schemes.catalog import named_scheme, scheme_names
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.routes import ALIASES, BLOCKWISE, COLUMNWISE, QUANT_STATS, QuantStat, TensorStat
from bridge.workflows.inspect.statistics.quantization import RECIPES, Quantization, of_recipe
from bridge.workflows.inspect.te.where import Where

T = TypeVar("T")
TENSOR_STATS = (
    "min", "max", "cur_amax", "mean", "l1_norm", "l2_norm", "rms", "std", "dynamic_range", BLOCKWISE, "numel", "zeros%",
    "nan%", "inf%", "amin", "outlier_ratio", "histogram", "kurtosis",
)  # fmt: skip
PERCENTILES = "p50 to p99.99"
GENERIC_STATS = ("min", "max", "mean", "std", "l1_norm", "l2_norm")  # of nvdlfw-inspect's own feature
_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d{1,2})?)")


def parse_tensor_stats(stats: Any, where: Where) -> tuple[TensorStat, ...]:
    """Return statistics of a tensor; what is unknown is recorded."""
    return _parsed(stats, where, _tensor_stat)


def parse_generic_stats(stats: Any, where: Where) -> tuple[TensorStat, ...]:
    """Return statistics of nvdlfw-inspect's own feature, which takes them in any case."""
    return _parsed(stats, where, _generic_stat)


def parse_quant_stats(stats: Any, where: Where, otherwise: str = "") -> tuple[QuantStat, ...]:
    """Return statistics of quantization; what is unknown is recorded.

    `otherwise`: the scheme of a statistic that names none; "" is that of the session, or of a module that quantizes by
    itself.
    """
    return _parsed(stats, where, partial(_quant_stat, otherwise=otherwise))


def check_scheme(name: Any, where: Where) -> str:
    """Return the name of a scheme or recipe, "" with a problem if there is none."""
    if isinstance(name, str):
        with suppress(UsageError):
            if name not in RECIPES:
                named_scheme(name)
            return name
    where.add(f"scheme {described(name)} is unknown; {nearest(str(name), [*scheme_names(), *RECIPES])}")
    return ""


def _parsed(stats: Any, where: Where, parse: Callable[[Any, Where], T | None]) -> tuple[T, ...]:
    """A list of statistics, or one, without those that are unknown."""
    if isinstance(stats, str | Mapping) and stats:
        stats = [stats]
    if not isinstance(stats, list | tuple) or not stats:
        text = "stats is missing" if stats is None else f"stats = {described(stats)}"
        where.add(f"{text}; expected a list of statistics")
        return ()
    return tuple(dict.fromkeys(filter(None, (parse(stat, where) for stat in stats))))


def _generic_stat(stat: Any, where: Where) -> TensorStat | None:
    if isinstance(stat, str) and stat.lower() in GENERIC_STATS:
        return TensorStat(stat.lower())
    where.add(f"statistic {described(stat)} is unknown; {nearest(str(stat), GENERIC_STATS)}")
    return None


def _tensor_stat(stat: Any, where: Where) -> TensorStat | None:
    if isinstance(stat, Mapping) and [*stat] == [BLOCKWISE]:
        return _blockwise(stat[BLOCKWISE], where)
    if stat == BLOCKWISE:
        return TensorStat(BLOCKWISE, 32, 1)
    if isinstance(stat, str) and (stat in TENSOR_STATS or _is_percentile(stat)):
        return TensorStat(stat)
    shown = ", ".join(map(str, stat)) if isinstance(stat, Mapping) else str(stat)
    where.add(f"statistic {shown!r} is unknown; {nearest(shown, TENSOR_STATS)}; and {PERCENTILES}")
    return None


def _is_percentile(stat: str) -> bool:
    match = _PERCENTILE.fullmatch(stat)
    return match is not None and float(match[1]) >= 50


def _blockwise(words: Any, where: Where) -> TensorStat | None:
    expected = "expected {block_size: 32, dims: 1}, where dims is 1 or 2"
    if not isinstance(words, Mapping):
        where.add(f"{BLOCKWISE} = {described(words)}; {expected}")
        return None
    if unknown := [str(key) for key in words if key not in ("block_size", "dims")]:
        where.add(f"{BLOCKWISE}: unknown key {unknown[0]!r}; {nearest(unknown[0], ('block_size', 'dims'))}")
        return None
    block_size, dims = words.get("block_size", 32), words.get("dims", 1)
    if type(block_size) is not int or block_size < 1 or type(dims) is not int or dims not in (1, 2):
        where.add(f"{BLOCKWISE}: block_size = {described(block_size)}, dims = {described(dims)}; {expected}")
        return None
    return TensorStat(BLOCKWISE, block_size, dims)


def _quant_stat(stat: Any, where: Where, otherwise: str) -> QuantStat | None:
    session, text = where.known.session, stat if isinstance(stat, str) else str(stat)
    columnwise = text.endswith(COLUMNWISE)
    rest = text.removesuffix(COLUMNWISE)
    known = [name for name in (*QUANT_STATS, *ALIASES) if rest == name or rest.endswith(f"_{name}")]
    written = max(known, key=len, default="")
    if not written:
        where.add(f"statistic {text!r} is unknown; {nearest(_last_words(rest), (*QUANT_STATS, *ALIASES))}")
        return None
    prefix = rest.removesuffix(written).removesuffix("_")
    scheme = check_scheme(prefix, where.inside(f"statistic {text!r}")) if prefix else otherwise
    if prefix and not scheme:
        return None
    if not scheme and session is None and not where.known.called:
        where.add(
            f"statistic {text!r} names no scheme, and the session quantizes nothing; write fp8_{text}, or pass quant="
        )
        return None
    if columnwise and (scheme or session) and not _blocks_turn(scheme, session):
        where.add(
            f"statistic {text!r}: the transpose has the same values, because {scheme or 'the scheme'} "
            f"has one scale for a tensor, or square blocks; leave {COLUMNWISE} out"
        )
        return None
    return QuantStat(ALIASES.get(written, written), scheme, columnwise, written)


def _last_words(text: str) -> str:
    """A statistic without a scheme before it, for the nearest known word."""
    scheme = max((name for name in (*scheme_names(), *RECIPES) if text.startswith(f"{name}_")), key=len, default="")
    return text.removeprefix(scheme).removeprefix("_") if scheme else text


def _blocks_turn(name: str, session: Scheme | None) -> bool:
    """Whether other values share a scale in the transpose."""
    if name in RECIPES:
        return of_recipe(name, "activation").turns
    scheme = named_scheme(name) if name else session
    assert scheme is not None
    numerics = [numeric for form in scheme.formats for numeric in (*form.weight, form.input) if numeric]
    return any(Quantization((numeric,)).turns for numeric in numerics)
