"""Versions that provenance names."""

from __future__ import annotations

from bridge.core.version import __version__, versions, versions_of


def test_what_took_part_is_named_with_its_version() -> None:
    assert versions_of(("qbridge", "numpy")) == {"qbridge": __version__, "numpy": versions()["numpy"]}
    assert versions_of(("absent",)) == {"absent": "unknown"}
