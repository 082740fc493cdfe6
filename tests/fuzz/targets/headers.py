"""Safetensors files: headers, against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors import safe_open

from bridge.core.dtypes import DTYPES
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, damaged, json_text, one_file, trees

FILE = "model.safetensors"
DTYPE_CODES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4", "I64", "U8", "BOOL", "C64", "f32", "F33")
LENGTHS = (0, 1, 7, 8, 2**31, 2**32, 100_000_001, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


def make(root: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.int64),
        "empty": np.empty((0, 3), np.float16),
        "scalar": np.array(1.5, np.float32),
    }
    (root / FILE).write_bytes(file_bytes(arrays, {"format": "pt"}))


@st.composite
def _files(draw: st.DrawFn, data: bytes) -> bytes:
    """The header changed and written again, its length sometimes wrong."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text: bytes = json_text(draw(trees(header, (*VALUES, *DTYPE_CODES))))
    if draw(st.integers(0, 4)) == 0:
        text = draw(damaged(text))
    if draw(st.booleans()):
        text += b" " * (-(len(text) + 8) % draw(st.sampled_from((1, 8, 64))))
    said: int = draw(st.sampled_from((len(text),) * 12 + (len(text) - 1, len(text) + 1, *LENGTHS)))
    return max(0, said).to_bytes(8, "little") + text + data[8 + length :]


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    whole = _files(data)
    return st.one_of(whole, whole, whole, damaged(data, edge=600)).map(one_file(FILE))


def read(root: Path) -> tuple[SafetensorsFile, dict[str, np.ndarray]]:
    file = SafetensorsFile(root / FILE)
    return file, {name: file.read(name) for name in file.specs}


def agree(root: Path, found: tuple[SafetensorsFile, dict[str, np.ndarray]]) -> None:
    """Hold what was read against the library: names (the empty one is a name too), and every byte."""
    file, arrays = found
    with safe_open(root / FILE, "np") as library:
        assert set(library.keys()) == set(arrays)
        assert (library.metadata() or {}) == file.header.metadata
        for name, array in arrays.items():
            slice_ = library.get_slice(name)
            assert tuple(slice_.get_shape()) == array.shape
            assert slice_.get_dtype() == DTYPES[file.specs[name].dtype].safetensors
            if slice_.get_dtype() not in ("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"):  # NumPy has no such dtypes
                assert library.get_tensor(name).tobytes() == array.tobytes()


TARGET = Target("headers", make, cases, read, agree, FILE)
