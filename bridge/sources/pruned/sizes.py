"""Resolve the sizes that a user asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.text import nearest
from bridge.tables.architectures.arch import ArchTable

_MULTIPLE = 64  # of widths that are given in percent: kernels want them
_COUNTS = ("layers", "heads", "kv_heads", "experts")


def sizes_of(table: ArchTable, names: Mapping[str, Any], keep: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the size of every dim of the pruned model, and what is wrong with those asked for."""
    sizes: dict[str, int] = {dim: names[dim] for dim in table.dims}
    problems: list[str] = []
    known = [dim for dim in table.roles.prune if dim in sizes]
    for dim, asked in keep.items():
        if dim not in known:
            what = "this architecture has no" if dim in table.roles.prune else "unknown dim"
            problems.append(f"{what} {dim!r}; {nearest(dim, known)}")
            continue
        size = _size(dim, asked, sizes[dim], sizes.get("kv_heads", 1))
        if not isinstance(size, int):
            problems.append(f"{dim}={asked}: {size}")
        elif not 1 <= size <= sizes[dim]:
            problems.append(f"{dim}={asked}: it is {sizes[dim]} now; give 1 to {sizes[dim]}")
        else:
            sizes[dim] = size
    if not problems:
        problems = _settle_heads(sizes, names, keep)
    if "hidden" in keep and table.scaled and sizes["hidden"] != names["hidden"]:
        why = "the embeddings are scaled by the square root of hidden, which would change"
        problems.append(f"hidden={sizes['hidden']}: {why}; leave hidden out")
    return sizes, problems


def _size(dim: str, asked: Any, before: int, groups: int) -> int | str:
    """The number that is asked for, or what is wrong with it."""
    text = str(asked).strip()
    share = text.endswith("%")
    try:
        number = float(text[:-1]) if share else int(text)
    except ValueError:
        return 'give a whole number, or a share such as "75%"'
    if not share:
        return int(number)
    if not 0 < number <= 100:
        return "a share is above 0% and at most 100%"
    size = int(before * number / 100)
    multiple = groups if dim == "heads" else 1 if dim in _COUNTS else _MULTIPLE
    return size // multiple * multiple or size


def _settle_heads(sizes: dict[str, int], names: Mapping[str, Any], keep: Mapping[str, Any]) -> list[str]:
    """Let query heads and their groups follow each other, and say if they do not fit."""
    if "kv_heads" not in sizes:
        return []
    heads, groups = names["heads"], names["kv_heads"]
    if "kv_heads" in keep and "heads" not in keep:
        sizes["heads"] = heads // groups * sizes["kv_heads"]
    elif heads == groups and "kv_heads" not in keep:
        sizes["kv_heads"] = sizes["heads"]
    if sizes["heads"] % sizes["kv_heads"]:
        fit = sizes["heads"] // sizes["kv_heads"] * sizes["kv_heads"] or sizes["kv_heads"]
        return [f"heads={sizes['heads']} is not a multiple of kv_heads={sizes['kv_heads']}; keep heads={fit}"]
    if sizes["heads"] // sizes["kv_heads"] > heads // groups:
        return [
            f"heads={sizes['heads']}: a group has {heads // groups} heads, so {sizes['kv_heads']} groups have fewer"
        ]
    return []


def layers_of(dropped: Sequence[int], count: int) -> tuple[list[int], list[str]]:
    """Return the layers that are left when some are dropped, and what is wrong with those."""
    wrong = sorted({layer for layer in dropped if not 0 <= layer < count})
    twice = sorted({layer for layer in dropped if list(dropped).count(layer) > 1})
    problems = [f"there is no layer {layer}; the model has 0 to {count - 1}" for layer in wrong]
    problems += [f"layer {layer} is dropped twice" for layer in twice]
    left = [layer for layer in range(count) if layer not in set(dropped)]
    if not left:
        problems.append("no layer would be left")
    return left, problems
