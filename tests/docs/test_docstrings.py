"""The examples in docstrings run: every module of the package, in a directory with `examples` in it."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import bridge
from docs.generate import api
from tests.blocks import prepare

WITH = [
    module.name
    for module in pkgutil.walk_packages(bridge.__path__, "bridge.")
    if not module.name.startswith("bridge._")
    and (spec := importlib.util.find_spec(module.name))
    and spec.origin
    and ">>> " in Path(spec.origin).read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_once")
@pytest.mark.parametrize("name", WITH)
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name.startswith("bridge.targets.tripy.models."):
        request.getfixturevalue("tp")  # nvtripy, which such modules import
    monkeypatch.chdir(prepare(tmp_path))
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"bridge": bridge}, optionflags=doctest.ELLIPSIS)
    assert not failed


@pytest.mark.parametrize("name", api.PAGES["verbs"][2])
def test_every_verb_has_an_example_that_is_not_skipped_and_tells_its_arguments(name: str) -> None:
    held = api.held(name)
    text = inspect.getdoc(held) or ""
    lines = [line for line in text.splitlines() if line.startswith(">>> ")]
    assert lines and not any("+SKIP" in line for line in lines), name


def test_the_interfaces_say_what_each_member_is() -> None:
    for name in ("bridge.sources.source.Source", "bridge.targets.Target", "bridge.sources.source.SourceKind"):
        kind = api.held(name)
        for member, found in vars(kind).items():
            if not member.startswith("_") and (callable(found) or isinstance(found, property)):
                assert inspect.getdoc(found), f"{name}.{member}"
