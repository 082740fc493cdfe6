"""Pickles of configuration (`common.pt`), as inert data: nothing may become an object of the class that it names."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from bridge.core.files.archive import open_folder
from bridge.core.formats.inert_pickle import Record
from bridge.core.formats.torch_pickle import StateDict, StoredTensor
from bridge.core.formats.unpickle import Call, Kind, Storage
from bridge.sources.weights.distributed import common_state
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import one_file
from tests.fuzz.opcodes import programs

FILE = "common.pt"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
OURS = (Record, StateDict, StoredTensor, Kind, Storage, Call)
MOST = 20_000  # objects that are looked at; a program may make one list hold itself


def make(root: Path) -> None:
    args = argparse.Namespace(
        num_layers=3, hidden_size=48, act=torch.nn.functional.silu, dtype=torch.bfloat16, extra=[1, (2.5, None)]
    )
    torch.save({"args": args, "iteration": 100, "checkpoint_version": 3.0, "w": torch.ones(2, 3)}, root / FILE)


def cases(root: Path) -> SearchStrategy[Case]:
    with zipfile.ZipFile(root / FILE) as zipped:
        members = {name: zipped.read(name) for name in zipped.namelist()}
    name = next(name for name in members if name.endswith("/data.pkl"))

    def packed(program: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as written:
            for member, content in (members | {name: program}).items():
                written.writestr(zipfile.ZipInfo(member), content)
        return out.getvalue()

    return programs(members[name], most=5).map(packed).map(one_file(FILE))


def read(root: Path) -> Any:
    saved = common_state(open_folder(root))
    assert saved is not None
    return saved.value


def agree(root: Path, found: Any) -> None:
    """Every object is plain data or one of bridge's inert kinds; plain data alone is what pickle reads."""
    seen: set[int] = set()
    plain = _inert(found, seen)
    if plain:
        with zipfile.ZipFile(root / FILE) as zipped:
            data = zipped.read(next(name for name in zipped.namelist() if name.endswith("/data.pkl")))
        try:
            wanted = _Nothing(io.BytesIO(data)).load()
        except Exception:  # what is made and thrown away again has no stand-in of every kind
            return
        assert repr(wanted) == repr(found)


class _Nothing(pickle.Unpickler):
    """pickle's own, which may look nothing up."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *given: None

    def persistent_load(self, pid: Any) -> None:
        return None


def _inert(value: Any, seen: set[int]) -> bool:
    """Whether `value` is plain data all through; AssertionError where something in it is alive."""
    if id(value) in seen or len(seen) > MOST:
        return True
    seen.add(id(value))
    if type(value) in PLAIN:
        return True
    if type(value) in (list, tuple, set, frozenset):
        return all([_inert(item, seen) for item in value])
    if type(value) is dict:
        return all([_inert(item, seen) for pair in value.items() for item in pair])
    assert isinstance(value, OURS) or (isinstance(value, type) and issubclass(value, Record)), type(value)
    if isinstance(value, Record):
        _inert((dict(value), value.args, value.state), seen)
    return False


TARGET = Target("records", make, cases, read, agree, FILE)
