"""The covering designs that choose rows of grids: complete, small, the same in every run; the rest is marked."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering, grid, usual

AXES = {"family": range(7), "scheme": "abcd", "kv": (None, "fp8")}


def test_every_value_and_every_pair_asked_for_occurs() -> None:
    rows = covering(AXES, pairs=[("scheme", "kv")])
    assert [{row[at] for row in rows} for at in range(3)] == [set(range(7)), set("abcd"), {None, "fp8"}]
    assert {row[1:] for row in rows} == set(itertools.product("abcd", (None, "fp8")))
    assert len(rows) == 8


def test_without_pairs_there_are_as_many_rows_as_the_longest_axis_has_values() -> None:
    assert len(covering(AXES)) == 7
    assert covering(AXES) == covering(AXES)


def test_values_of_an_axis_are_used_equally_often() -> None:
    rows = covering({"family": range(8), "scheme": "abcd"})
    assert sorted(row[1] for row in rows) == list("aabbccdd")


def test_of_equal_rows_the_cheapest_are_taken() -> None:
    rows = covering({"family": range(8), "scheme": "abcd"}, cost=lambda family, scheme: scheme != "c")
    assert sorted(row[1] for row in rows) == list("abcccccd")
    rows = covering({"family": range(8), "scheme": "abcd"}, cost=lambda family, scheme: scheme in "ad")
    assert sorted(row[1] for row in rows) == list("abbbcccd")


def test_refused_rows_are_never_taken_and_rows_asked_for_always_are() -> None:
    rows = covering(AXES, valid=lambda family, scheme, kv: not (scheme == "a" and kv), first=[(6, "d", None)])
    assert (6, "d", None) in rows
    assert {row[2] for row in rows if row[1] == "a"} == {None}


def test_what_a_row_shows_besides_its_values_occurs_too() -> None:
    rows = covering({"family": range(5), "scheme": "abc"}, shows=lambda family, scheme: {family + ord(scheme)})
    sums = {family + ord(scheme) for family, scheme in itertools.product(range(5), "abc")}
    assert {family + ord(scheme) for family, scheme in rows} == sums


def test_rows_of_the_design_are_slow_and_the_rest_is_marked_as_the_product() -> None:
    params = grid(AXES, fast=[(6, "d", None)]).mark.args[1]
    marks = {param.values: {mark.name for mark in param.marks} for param in params}
    assert marks.keys() == set(itertools.product(*AXES.values()))
    assert marks.pop((6, "d", None)) == set()
    chosen = covering(AXES, first=[(6, "d", None)])
    assert {row for row, names in marks.items() if names == {"slow"}} == set(chosen) - {(6, "d", None)}
    assert all(names in ({"slow"}, {"slow", "product"}) for names in marks.values())


def test_all_values_but_the_usual_ones_are_for_the_whole_product() -> None:
    params = usual(["a", (2, "b")], ["a", "b", (2, "b")])
    assert [param.values for param in params] == [("a",), ("b",), (2, "b")]
    assert [[mark.name for mark in param.marks] for param in params] == [[], ["product"], []]
    with pytest.raises(AssertionError, match="'c'"):
        usual(["c"], ["a", "b"])
