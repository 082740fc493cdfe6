"""A golden's files: read as a stranger's, written whole or not at all; digests are what somebody else computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

import bridge
from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import GoldenError, VerifyError
from bridge.core.values import TensorSpec
from bridge.workflows.golden import digests
from bridge.workflows.golden.digests import digest_tensor
from bridge.workflows.golden.store import load, positions
from tests.models.golden_made import Q, changed, written

CASTS: dict[str, Any] = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu, "int8": np.int8, "int16": np.int16, "int32": np.int32,
    "uint8": np.uint8, "int64": np.int64,
}  # fmt: skip


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden beside the model that it was recorded of."""
    place = tmp_path_factory.mktemp("golden")
    bridge.golden.record(written(place / "out"), place / "golden", run=False)
    return place / "golden"


def digested(bits: np.ndarray, dtype: str) -> digests.Digest:
    data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    spec = TensorSpec("some.weight", bits.shape, dtype)
    return digest_tensor(Held(spec, data), spec, Buffers(), statistics=True)


class Held:
    """One tensor in memory, read as a file is."""

    def __init__(self, spec: TensorSpec, data: np.ndarray) -> None:
        self.specs = {spec.name: spec}
        self._data = data

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        yield from (self._data[begin : begin + size] for begin in range(0, self._data.size, size))


@pytest.mark.parametrize("dtype", sorted(CASTS))
def test_statistics_are_those_of_the_values(dtype: str) -> None:
    width = DTYPES[dtype].bits // 8
    raw = np.random.default_rng(0).integers(0, 256, (6_001, 401 * width), np.uint8)  # more than one piece, with NaN
    bits = raw.view(DTYPES[dtype].storage)
    with np.errstate(invalid="ignore"):
        values = bits.view(CASTS[dtype]).astype(np.float64)
    if dtype in ("float32", "float64"):
        values = np.where(np.abs(values) < 1e9, values, 1.0)
        bits = values = values.astype(CASTS[dtype])
    finite = values[np.isfinite(values)].astype(np.float64)
    found = digested(bits, dtype)
    assert found.hash == xxhash.xxh3_128_hexdigest(bits.tobytes())
    assert found.statistics
    assert (found.statistics.min, found.statistics.max) == (finite.min(), finite.max())
    assert found.statistics.nonfinite == values.size - finite.size
    assert found.statistics.mean == pytest.approx(finite.mean(), rel=1e-8, abs=1e-9 * np.abs(finite).max())
    assert found.sample.tobytes() == bits.reshape(-1)[positions("some.weight", bits.size)].tobytes()


def test_statistics_of_nothing_finite_and_of_nothing() -> None:
    assert digested(np.full(5, np.nan, np.float32), "float32").statistics == digests.Statistics(None, None, None, 5)
    assert digested(np.empty((0, 3), np.float32), "float32").statistics == digests.Statistics(None, None, None, 0)


def test_positions_have_both_ends_and_follow_the_name_alone() -> None:
    found = positions("a.weight", 1_000_000)
    assert {0, 7, 999_992, 999_999} <= set(found.tolist()) and found.tolist() == sorted(set(found.tolist()))
    assert np.array_equal(found, positions("a.weight", 1_000_000))
    assert not np.array_equal(found, positions("b.weight", 1_000_000))
    assert np.array_equal(positions("a.weight", 5), np.arange(5))


def test_a_missing_library_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(GoldenError, match=r"pip install .*\[golden\]'"):
        digests.hasher()


def _head(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(golden: Path) -> None:
        head = json.loads((golden / "golden.json").read_text())
        change(head)
        (golden / "golden.json").write_text(json.dumps(head))

    return damage


def _line(old: str, new: str, file: str = "tensors.jsonl") -> Callable[[Path], None]:
    """Change a line and the digest with it, as somebody would who means it."""

    def damage(golden: Path) -> None:
        text = (golden / file).read_text()
        assert old in text
        (golden / file).write_text(text.replace(old, new, 1))
        from bridge.workflows.golden.store import LINES, _digest

        lines = {name: (golden / name).read_bytes() for name in LINES}
        _head(lambda head: head.update(digest=_digest(lines)))(golden)

    return damage


def _cut(file: str, at: int = 100) -> Callable[[Path], None]:
    return lambda golden: (golden / file).write_bytes((golden / file).read_bytes()[:at]) and None


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no json": _cut("golden.json"),
    "a list": lambda golden: (golden / "golden.json").write_text("[]"),
    "deep": lambda golden: (golden / "golden.json").write_text("[" * 100_000),
    "another version": _head(lambda head: head.update(golden=2)),
    "no options": _head(lambda head: head.pop("options")),
    "options": _head(lambda head: head.update(options=[1])),
    "history": _head(lambda head: head.update(history=[{"date": 3}])),
    "a path as recipe": _head(lambda head: head["rerun"].update(quant="/etc/passwd.toml")),
    "a lost recipe": _head(lambda head: head["rerun"].update(quant="lost.toml")),
    "an edited line": lambda golden: _replace(golden / "tensors.jsonl", '"int8"', '"bool"'),
    "cut lines": _cut("tensors.jsonl"),
    "no lines": lambda golden: (golden / "origins.jsonl").unlink(),
    "no UTF-8": lambda golden: (golden / "files.jsonl").write_bytes(b"\xff\xfe"),
    "an unknown dtype": _line('"int8"', '"int9"'),
    "a shape of words": _line('"shape": [', '"shape": ["a", '),
    "a huge shape": _line('"shape": [', '"shape": [99999999999999999999, '),
    "a negative shape": _line('"shape": [', '"shape": [-1, '),
    "rows that are no texts": _line('"rows": ["', '"rows": [3, "', "origins.jsonl"),
    "a line that is not an object": _line("{", "[{", "files.jsonl"),
    "samples cut": _cut("values.safetensors", 2_000),
    "samples gone": lambda golden: (golden / "values.safetensors").unlink(),
}


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_golden_is_one_clear_error(case: str, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / "golden")
    DAMAGES[case](tmp_path / "golden")
    with pytest.raises(GoldenError, match=r"damaged, or not written by qbridge: .*\n  hint"):
        load(tmp_path / "golden")
    with pytest.raises(GoldenError):
        bridge.golden.record(golden.parent / "out", tmp_path / "golden", run=False, reason="whatever")


def test_what_is_no_golden_is_told_with_the_command(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(GoldenError, match="qbridge golden record OUT"):
            load(place)


def test_a_golden_and_a_written_model_are_told_apart_in_either_order(golden: Path) -> None:
    out = golden.parent / "out"
    assert bridge.golden.check(out, golden).moves == bridge.golden.check(golden, out).moves == ()


def test_a_model_that_is_not_there_is_no_such_directory(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"nowhere: no such directory; name one that `convert` wrote$"):
        bridge.golden.check(golden, tmp_path / "nowhere")


def test_a_directory_with_other_files_is_left_alone(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "notes.txt").write_text("mine")
    with pytest.raises(GoldenError, match=r"holds notes\.txt: keep a golden in a directory of its own"):
        bridge.golden.record(golden.parent / "out", tmp_path / "golden", run=False)
    assert [path.name for path in (tmp_path / "golden").iterdir()] == ["notes.txt"]


def test_an_update_that_fails_leaves_the_old_golden(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(golden, tmp_path / "golden")
    other = changed(golden.parent / "out", tmp_path / "out", Q)
    before = {path.name: path.read_bytes() for path in golden.iterdir()}
    write, count = Path.write_bytes, [0]

    def full(path: Path, data: bytes) -> int:
        count[0] += 1
        if count[0] == 3:
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(bridge.BridgeError, match="the disk is full"):
        bridge.golden.record(other, tmp_path / "golden", run=False, reason="new")
    assert {path.name: path.read_bytes() for path in (tmp_path / "golden").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden", "out"]
