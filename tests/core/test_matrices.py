"""Matrices in a file: rows come back as they were appended, also when the file has no name any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.core.errors import SourceError
from bridge.core.files.matrices import AppendedFile
from bridge.core.formats.safetensors import SafetensorsFile, file_pieces


def matrices() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, shape, np.uint8) for shape in ((5, 7), (1, 3), (64, 11))]


@pytest.mark.parametrize("named", [True, False])
def test_rows_come_back_after_the_name_is_gone(named: bool, tmp_path: Path) -> None:
    path = tmp_path / "codes.bin" if named else None
    file = AppendedFile(path)
    kept = [file.append(matrix) for matrix in matrices()]
    if path:
        path.unlink()
    del file
    for matrix, found in zip(matrices(), kept, strict=True):
        assert (found.shape, found.dtype, found.nbytes) == (matrix.shape, matrix.dtype, matrix.nbytes)
        for rows in (slice(None), slice(1, 4), slice(2, 2), slice(-2, None)):
            assert np.array_equal(found[rows], matrix[rows])


def test_what_was_not_recorded_is_cut_off_and_what_is_lost_is_told(tmp_path: Path) -> None:
    first, second, third = matrices()
    file = AppendedFile(tmp_path / "codes.bin")
    place = file.append(first).offset
    file.append(second)
    again = AppendedFile(tmp_path / "codes.bin", first.nbytes)
    assert np.array_equal(again.matrix(place, first.shape)[0:5], first)
    assert np.array_equal(again.append(third)[0:64], third)
    assert (tmp_path / "codes.bin").stat().st_size == first.nbytes + third.nbytes
    with pytest.raises(SourceError, match="shorter than the 10000 bytes"):
        AppendedFile(tmp_path / "codes.bin", 10_000)


def test_pieces_of_matrices_in_a_file_make_the_file_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile()
    arrays: dict[str, np.ndarray] = {f"codes/{at}": matrix for at, matrix in enumerate(matrices())}
    arrays |= {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(3).reshape(())}
    whole = b"".join(file_pieces(arrays, {"key": "value"}))
    monkeypatch.setattr("bridge.core.formats.safetensors.PIECE", 64)
    kept = {name: file.append(array) if name.startswith("codes") else array for name, array in arrays.items()}
    assert b"".join(file_pieces(kept, {"key": "value"})) == whole
    (tmp_path / "a.safetensors").write_bytes(whole)
    read = SafetensorsFile(tmp_path / "a.safetensors")
    assert all(np.array_equal(read.read(name), array) for name, array in arrays.items())
    assert np.array_equal(read.matrix("codes/2")[3:9], arrays["codes/2"][3:9])
