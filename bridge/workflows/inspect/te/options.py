"""Resolve and read a feature's options for one tensor and GEMM.

tensors: [activation, weight]            the outer options for each
tensors_struct: [{tensor: weight, ...}]  its own options over the outer ones
gemms: [fprop]                           with tensors or tensors_struct beside it, if the feature needs tensors
gemms_struct: [{gemm: fprop, ...}]       with tensors or tensors_struct inside
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.core.text import described, nearest
from bridge.workflows.inspect.routes import GEMMS, Interval, Schedule
from bridge.workflows.inspect.te.where import Where

NAMING = ("tensors", "tensors_struct", "gemms", "gemms_struct")
_ONE = {"tensors": "tensor", "gemms": "gemm"}
SCHEDULE_KEYS = ("freq", "start_step", "end_step", "start_end_list")
NO_END = -1  # as the documentation of nvdlfw-inspect has it; TransformerEngine's code takes it for "never"

Given = dict[str, Any]


def merged(words: Mapping[str, Any], tensor: str = "", gemm: str = "") -> Given | None:
    """Return the options for a tensor, a GEMM, or both; None if the words do not name them. Checked words only.

    >>> merged({"tensors_struct": [{"tensor": "weight", "freq": 2}], "stats": ["min"]}, "weight")
    {'stats': ['min'], 'tensor': 'weight', 'freq': 2}
    """
    outer = _without_names(words)
    if not gemm:
        return _over(outer, _entry(words, "tensors", tensor))
    entry = _entry(words, "gemms", gemm)
    if entry is None or not tensor:
        return _over(outer, entry)
    struct = words.get("gemms_struct")
    inner = _entry(next(one for one in struct if one["gemm"] == gemm) if struct else words, "tensors", tensor)
    return None if inner is None else {**outer, **entry, **inner}


def _over(outer: Given, entry: Given | None) -> Given | None:
    return None if entry is None else {**outer, **entry}


def _entry(words: Mapping[str, Any], key: str, name: str) -> Given | None:
    """What `key` or its struct says of a name; None without it."""
    one = _ONE[key]
    if f"{key}_struct" in words:
        return next((_without_names(entry) for entry in words[f"{key}_struct"] if entry[one] == name), None)
    return {one: name} if name in names_of(words, key) else None


def _without_names(words: Mapping[str, Any]) -> Given:
    return {key: value for key, value in words.items() if key not in (*NAMING, "enabled")}


def names_of(words: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names that `tensors` or `gemms` lists, or its struct; a text is a list of one. Checked words only.

    >>> names_of({"tensors": "weight"}, "tensors")
    ('weight',)
    """
    if f"{key}_struct" in words:
        return tuple(entry[_ONE[key]] for entry in words[f"{key}_struct"])
    listed = words.get(key, ())
    return (listed,) if isinstance(listed, str) else tuple(listed)


def check_names(
    words: Mapping[str, Any], where: Where, *, tensors: tuple[str, ...] | None, keys: tuple[str, ...]
) -> None:
    """Record what is wrong with the tensors and GEMMs that a feature names.

    `keys`: "tensors", "gemms" or both, each needed. `tensors`: those that the feature takes; None takes any name.
    """
    known = {"tensors": tensors, "gemms": GEMMS}
    if "gemms" in keys and "gemms_struct" in words and "tensors" in keys:
        _check_listed(words, "gemms", where, GEMMS)
        if outside := [key for key in ("tensors", "tensors_struct") if key in words]:
            where.add(f"{outside[0]} stands beside gemms_struct; write it inside each entry")
        for entry in structs(words, "gemms"):
            _check_listed(entry, "tensors", where.inside(f"gemms_struct: {entry.get('gemm')}"), tensors)
        return
    for key in keys:
        _check_listed(words, key, where, known[key])


def structs(words: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The entries of `tensors_struct` or `gemms_struct`; words that are not checked may have none."""
    struct = words.get(f"{key}_struct")
    return [entry for entry in struct if isinstance(entry, Mapping)] if isinstance(struct, list | tuple) else []


def leaves(words: Mapping[str, Any]) -> list[Given]:
    """Every set of options in words whose names are not checked: those of structs over the outer ones."""
    outer = _without_names(words)
    inner = structs(words, "gemms") or structs(words, "tensors")
    return [{**outer, **leaf} for entry in inner for leaf in leaves(entry)] if inner else [outer]


def _check_listed(words: Mapping[str, Any], key: str, where: Where, known: tuple[str, ...] | None) -> None:
    """Record problems of `tensors` or `gemms` and its struct, one of which is needed."""
    struct, one = f"{key}_struct", _ONE[key]
    if (key in words) == (struct in words):
        text = f"{key} and {struct} are both given; write one" if key in words else f"{key} is missing"
        where.add(text + (f"; known: {', '.join(known)}" if known else ""))
        return
    names: list[Any] = []
    if key in words:
        names = [words[key]] if isinstance(words[key], str) else words[key]
        if not isinstance(names, list | tuple) or not names:
            given = "an empty list" if words[key] == [] else described(words[key])
            where.add(f"{key} = {given}; expected a list of names")
            return
    else:
        entries = words[struct]
        if not isinstance(entries, list | tuple) or not entries or len(structs(words, key)) < len(entries):
            where.add(f"{struct}: expected a list of entries, as in [{{{one}: {(known or ('name',))[0]}, ...}}]")
            return
        if lacking := [entry for entry in entries if one not in entry]:
            where.add(f"{struct}: an entry without `{one}`: {', '.join(map(str, lacking[0]))}")
        names = [entry[one] for entry in entries if one in entry]
        for name in dict.fromkeys(str(name) for name in names if names.count(name) > 1):
            where.add(f"{struct} has {name!r} twice; the first would hide the second")
    for name in names:
        if not isinstance(name, str) or (known and name not in known):
            where.add(f"{one} {described(name)} is unknown here; {nearest(str(name), known or ())}")


def parse_schedule(words: Mapping[str, Any], where: Where, *, excluded: bool = False) -> Schedule:
    """Return the schedule of a feature's options; its problems are recorded.

    `excluded`: the end of a pair in `start_end_list` is not part of it, as in nvdlfw-inspect's own feature.
    """
    before = where.count
    freq = _step(words, "freq", 1, where, least=1)
    pairs = words.get("start_end_list")
    if pairs:
        intervals = _pairs(pairs, where, excluded)
    else:
        first = _step(words, "start_step", 0, where)
        last = _step(words, "end_step", NO_END, where, least=NO_END)
        intervals = [(first, None if last == NO_END else last)]
    schedule = Schedule(freq, tuple(sorted(intervals, key=lambda ends: ends[0])))
    if where.count == before and schedule.next_due(-1) is None:
        steps = ", ".join(f"{first} to {last}" for first, last in schedule.intervals)
        where.add(f"never due: no step from {steps} is a multiple of freq = {freq}, which counts from step 0")
        return Schedule()
    return schedule if where.count == before else Schedule()


def _pairs(pairs: Any, where: Where, excluded: bool) -> list[Interval]:
    if not isinstance(pairs, list | tuple):
        where.add(f"start_end_list = {described(pairs)}; expected a list of pairs, as in [[0, 20], [80, 100]]")
        return []
    intervals: list[Interval] = []
    for pair in pairs:
        match pair:
            case [int(first), int(last)] if first >= 0 and (last == NO_END or last >= first + excluded):
                intervals.append((first, None if last == NO_END else last - excluded))
            case _:
                where.add(
                    f"start_end_list: {list(pair) if isinstance(pair, list | tuple) else described(pair)}; "
                    f"expected a first step and a last one that is not before it, or {NO_END} for no end"
                )
    return intervals


def _step(words: Mapping[str, Any], key: str, otherwise: int, where: Where, least: int = 0) -> int:
    value = words.get(key)
    if value is None:
        return otherwise
    if type(value) is not int or value < least:
        end = f", or {NO_END} for no end" if least == NO_END else ""
        where.add(f"{key} = {described(value)}; expected a whole number from {max(least, 0)} on{end}")
        return otherwise
    return value
