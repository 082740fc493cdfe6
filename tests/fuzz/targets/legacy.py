"""Files of torch before 1.6, five pickles and the storages, against torch.load(weights_only=True)."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.formats.torch_file import TorchFile
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, one_file
from tests.fuzz.opcodes import programs
from tests.fuzz.targets.pickles import agree_or_known, state

FILE = "pytorch_model.bin"


def make(root: Path) -> None:
    torch.save(state(), root / FILE, _use_new_zipfile_serialization=False)


def _parts(data: bytes) -> list[bytes]:
    """The five pickles, and what follows them."""
    stream, found = io.BytesIO(data), []
    for _ in range(5):
        begin = stream.tell()
        reader = pickle._Unpickler(stream)
        reader.persistent_load = lambda pid: None  # type: ignore[method-assign]
        reader.find_class = lambda module, name: lambda *given: None  # type: ignore[method-assign]
        reader.load()
        found.append(data[begin : stream.tell()])
    return [*found, data[stream.tell() :]]


@st.composite
def _files(draw: st.DrawFn, parts: list[bytes]) -> bytes:
    found = list(parts)
    at = draw(st.sampled_from((0, 1, 2, 3, 3, 3, 3, 4, 4, 5)))
    found[at] = draw(damaged(found[at], edge=8)) if at == 5 else draw(programs(found[at]))
    return b"".join(found)


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    whole = _files(_parts(data))
    return st.one_of(whole, whole, whole, damaged(data)).map(one_file(FILE))


def read(root: Path) -> dict[str, np.ndarray]:
    file = TorchFile(root / FILE)
    return {name: file.read(name) for name in file.specs}


def agree(root: Path, found: dict[str, np.ndarray]) -> None:
    agree_or_known(lambda: torch.load(root / FILE, "cpu", weights_only=True), found, state())


TARGET = Target("legacy", make, cases, read, agree, FILE)
