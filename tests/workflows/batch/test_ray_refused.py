"""Ray: what is refused without a cluster, and the settings of a manifest."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

import bridge
from bridge.core.errors import SourceError, UsageError
from bridge.workflows.batch.engines import make_engine, make_settings
from bridge.workflows.batch.engines.ray.engine import Settings
from bridge.workflows.batch.values import Limits, Row
from tests.workflows.batch.test_ray import engine


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[ray\]'"):
        make_engine("ray", Settings(), Limits())


def test_an_address_where_no_cluster_is_is_told_of() -> None:
    with pytest.raises(UsageError, match=r"\[ray\] address = '127.0.0.1:9' cannot be reached"):
        engine("127.0.0.1:9")


def test_settings_are_read_from_the_manifests_table() -> None:
    assert make_settings("ray", {"address": "auto", "cpus": 4}) == Settings("auto", 4, 3)
    with pytest.raises(UsageError, match=r"\[ray\] has no key `adress`"):
        make_settings("ray", {"adress": "auto"})
    with pytest.raises(UsageError, match="retries = -1"):
        make_engine("ray", Settings(retries=-1), Limits())


def test_a_partition_of_another_model_than_the_rows_is_refused(tmp_path: Path) -> None:
    rows = pytest.importorskip("bridge.workflows.batch.engines.ray.rows")
    tiny = str(Path(__file__).parents[3] / "examples/models/tiny-llama")
    row = Row("tiny", "", tiny, "hf", "out")
    offer = rows.Offer(row, "other", None, None, None, 1, 1, tmp_path, "", bridge.__version__)
    with pytest.raises(SourceError, match="is a different model on"):
        rows.same_source(offer)
    with pytest.raises(UsageError, match="has qbridge"):
        rows.same_source(replace(offer, version="0.0"))
    with pytest.raises(SourceError, match="cannot be opened on"):
        rows.same_source(replace(offer, row=replace(row, model=str(tmp_path))))
