"""A source with only the members that every source must have opens, converts and reports like any other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.sources import opening
from bridge.sources.memory import MemorySource
from bridge.sources.opening import open_source
from bridge.sources.source import Delegate, Source, SourceBase, Wrapped, completed
from tests.models.sources_made import made_llama

REQUIRED = [
    "dialect", "where", "name", "can_run", "config", "specs", "side_files", "dropped", "read", "read_rows", "place",
    "quantized", "calibration", "fingerprint", "load_model", "load_skeleton", "load_tokenizer",
]  # fmt: skip


class Plain:
    """The members of `REQUIRED`, and none of those that `SourceBase` has defaults for."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.specs: Mapping[str, Any] = made.specs
        for name in ("dialect", "where", "name", "can_run", "config", "side_files", "dropped", "fingerprint"):
            setattr(self, name, getattr(made, name))
        self.quantized = self.calibration = None

    def read(self, name: str) -> Any:
        return self._made.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: Any = None) -> Any:
        return self._made.read_rows(name, begin, end, out)

    def place(self, name: str) -> tuple[str, int]:
        return "", 0

    def load_model(self) -> Any:
        return self._made.load_model()

    load_skeleton = load_tokenizer = load_model


@pytest.fixture
def plain() -> Plain:
    return Plain(made_llama())


def test_every_member_is_required_or_has_a_default() -> None:
    members = {name for name in vars(Source) if not name.startswith("_")}
    defaults = {name for name in vars(SourceBase) if not name.startswith("_")}
    assert members == {*REQUIRED} | defaults
    assert SourceBase.__annotations__.keys() <= defaults


def test_a_source_of_required_members_has_the_defaults_of_the_others(plain: Plain) -> None:
    source = open_source(plain)
    assert [getattr(source, name) for name in REQUIRED[:8]] == [getattr(plain, name) for name in REQUIRED[:8]]
    assert (source.root, source.folder, source.runs_in, source.note) == (None, "", "", "")
    assert source.merge_memory == 0 and source.served("vllm serve out") == "vllm serve out"
    assert source.kept is source.sparse is source.adapter is source.summary is source.distillation is None
    with pytest.raises(AttributeError, match="tokens"):
        _ = source.tokens  # type: ignore[attr-defined]


def test_empty_bodies_that_a_source_inherits_from_the_protocol_are_no_members(plain: Plain) -> None:
    derived = type("Derived", (Source,), {name: getattr(plain, name) for name in REQUIRED})()
    assert derived.runs_in is None  # the protocol's body
    source = open_source(derived)
    assert (source.root, source.runs_in, source.merge_memory) == (None, "", 0)
    assert source.served("vllm serve out") == "vllm serve out"
    assert bridge.plan(source, target="hf", quant="fp8").memory == bridge.plan(plain, target="hf", quant="fp8").memory


def test_members_that_it_has_are_its_own(plain: Plain, tmp_path: Path) -> None:
    plain.root = tmp_path  # type: ignore[attr-defined]
    assert open_source(plain).root == tmp_path


def test_one_that_is_complete_is_opened_as_it_is(plain: Plain) -> None:
    made = made_llama()
    assert open_source(made) is made
    once = open_source(plain)
    assert open_source(once) is once and isinstance(copy.copy(once), Delegate)
    assert pickle.loads(pickle.dumps(completed(SimpleNamespace(name="a")))).folder == ""


def test_a_kind_of_an_entry_point_may_open_one(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SimpleNamespace(recognizes=lambda model: model == "mine", open_model=lambda *_: plain)
    monkeypatch.setattr(opening, "registered", lambda _: [SimpleNamespace(load=lambda: kind)])
    assert open_source("mine").folder == ""


def test_it_is_written_as_the_same_model_of_ours(plain: Plain, tmp_path: Path) -> None:
    for name, source in (("theirs", plain), ("ours", made_llama())):
        assert bridge.convert(source, target="hf", quant="int8_wo", out=tmp_path / name).passed
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "ours")]
    assert written[0] == written[1]


def test_sources_of_this_package_derive_from_the_base() -> None:
    from bridge.sources.adapted.copied import CopiedAdapterSource
    from bridge.sources.adapted.source import AdaptedSource
    from bridge.sources.checkpoint import HfSource
    from bridge.sources.live_models.trained import TrainedSource
    from bridge.sources.pruned.source import PrunedSource

    assert all(issubclass(kind, Wrapped) for kind in (AdaptedSource, CopiedAdapterSource, PrunedSource, TrainedSource))
    assert issubclass(HfSource, SourceBase) and issubclass(MemorySource, SourceBase)
