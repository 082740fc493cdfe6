"""Bytes read straight into rows that lie apart: in order, nothing between them touched, a file's end noticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bridge.core.errors import SourceError
from bridge.core.files.span import MAX_ROWS, read_rows_into, span_of


@pytest.mark.parametrize(
    ("count", "length", "apart", "dtype"),
    [
        (1, 5, 9, "u1"),
        (7, 3, 11, "<f4"),
        (MAX_ROWS, 1, 2, "<u2"),
        (2 * MAX_ROWS + 3, 2, 5, "<u2"),
        (40, 700, 701, "<f8"),
    ],
)
def test_rows_are_filled_in_the_order_of_the_file(
    count: int, length: int, apart: int, dtype: str, tmp_path: Path
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 13 + count * length * np.dtype(dtype).itemsize, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    want = data[13:].view(dtype).reshape(count, length)
    out = np.full((count, apart), 7, dtype)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    read_rows_into(fd, out[:, :length], 13, tmp_path / "f")
    os.close(fd)
    assert out[:, :length].tobytes() == want.tobytes()
    assert (out[:, length:] == 7).all()


def test_rows_may_lie_in_any_order(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * 3 * 4 * 5, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    out = np.zeros((2, 4, 3, 5), np.uint8)
    span_of(tmp_path / "f").read_into(out.swapaxes(1, 2), 0)
    assert np.array_equal(out.swapaxes(1, 2), data.reshape(2, 3, 4, 5))


def test_a_file_that_ends_inside_a_row_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    out = np.zeros((10, 13), np.uint8)
    with pytest.raises(SourceError, match="f: ends at byte 100, inside a tensor"):
        span_of(tmp_path / "f").read_into(out[:, :11], 0)
    assert out[8, :11].tolist() == list(range(88, 99))
