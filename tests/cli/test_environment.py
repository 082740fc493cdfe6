"""`qbridge show environment`: what it says of versions that are missing, outside their range, or right."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from bridge.cli import environment
from bridge.cli.main import app
from bridge.core import version
from bridge.core.errors import UsageError
from bridge.core.ranges import check_versions

NEEDS = [
    "numpy>=2.0",
    "torch<2.14,>=2.13; extra == 'trt'",
    "transformers<5.24,>=5.20; extra == 'trt'",
    "xxhash>=3.5; extra == 'golden'",
    "winonly>=1; sys_platform == 'none' and extra == 'golden'",
    "quantbridge[trt]; extra == 'dev'",
]
FOUND = {"numpy": "2.3.5", "torch": "2.13.0+cpu", "transformers": "5.24.0", "vllm": "0.33.0"}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: NEEDS)
    for module in (environment, version):
        monkeypatch.setattr(module, "installed", lambda name: FOUND.get(name, ""))


@pytest.mark.usefixtures("shown")
def test_each_extra_says_what_works_what_does_not_and_the_remedy() -> None:
    done = CliRunner().invoke(app, ["show", "environment", "--json"])
    assert done.exit_code == 0, done.output
    extras = {extra["extra"]: extra for extra in json.loads(done.stdout)["extras"]}
    assert {name: extra["works"] for name, extra in extras.items()} == {"": True, "trt": False, "golden": False}
    assert [package["fits"] for package in extras["trt"]["packages"]] == [True, False]
    assert "[trt]" in extras["trt"]["fix"] and extras[""]["fix"] == ""
    assert [package["name"] for package in extras["golden"]["packages"]] == ["xxhash"]
    assert json.loads(done.stdout)["programs"] == [{"program": "vLLM", "installed": "0.33.0", "contract": "0.33"}]


@pytest.mark.usefixtures("shown")
def test_the_table_names_the_version_that_is_outside() -> None:
    said = " ".join(CliRunner().invoke(app, ["show", "environment"], env={"COLUMNS": "300"}).output.split())
    assert "transformers 5.24.0 is outside <5.24,>=5.20" in said and "xxhash is missing" in said


@pytest.mark.usefixtures("shown")
def test_work_that_loads_a_version_outside_its_range_is_refused_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"^transformers 5\.24\.0 is outside <5\.24,>=5\.20") as caught:
        check_versions("trt")
    assert str(caught.value).endswith("pip install 'transformers<5.24,>=5.20'")
    check_versions("golden")  # it loads neither


def test_it_runs_with_what_is_installed_here() -> None:
    assert CliRunner().invoke(app, ["show", "environment"]).exit_code == 0


def test_every_extra_that_a_user_may_install_has_a_use() -> None:
    """Of the metadata that pip wrote: those of `dev`, `docs` and `remote` are for work on the package, or others."""
    found = importlib.metadata.metadata(environment.DISTRIBUTION).get_all("Provides-Extra") or []
    assert {*found} - {"dev", "docs", "remote"} == {*environment.USES} - {""}
    names = {Requirement(text).name for text in importlib.metadata.requires(environment.DISTRIBUTION) or ()}
    assert {"torch", "transformers", "numpy"} <= names
