"""The safetensors format: we read what the reference writes, it reads what we write, the rest is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes, layout, read_header, stored_shape
from bridge.core.values import TensorSpec
from bridge.sources.opening import open_source
from tests.models.sparse_checkpoint import LLAMA_405B, llama_specs, write_sparse

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
}


def put(path: Path, header: bytes | dict[str, Any], data: bytes = bytes(29)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def changed(**rows: Any) -> dict[str, Any]:
    return {name: {**GOOD[name], **row} for name, row in {**{n: {} for n in GOOD}, **rows}.items()}


BAD = {
    "truncated data": (GOOD, bytes(20), "shorter than its tensors: tensors take 29 bytes, the file holds 20"),
    "trailing data": (GOOD, bytes(31), "longer than its tensors"),
    "overlap": (changed(b={"data_offsets": [20, 25]}), bytes(25), "b overlaps"),
    "hole": (changed(b={"data_offsets": [26, 31]}), bytes(31), "b leaves a hole of 2 bytes"),
    "out of bounds": (changed(b={"data_offsets": [24, 29]}), bytes(24), "shorter than its tensors"),
    "offsets reversed": (changed(a={"data_offsets": [24, 0]}), bytes(29), r"a: data_offsets must be \[begin, end\]"),
    "three offsets": (changed(a={"data_offsets": [0, 24, 24]}), bytes(29), "a: data_offsets must be"),
    "negative offset": (changed(a={"data_offsets": [-4, 20]}), bytes(29), "a: data_offsets must be a list of non-neg"),
    "float shape": (changed(a={"shape": [2.0, 3]}), bytes(29), "a: shape must be a list of non-negative integers"),
    "boolean shape": (changed(b={"shape": [True, 5]}), bytes(29), "b: shape must be a list"),
    "size against shape": (changed(a={"shape": [2, 4]}), bytes(29), "takes 32 bytes, its data_offsets give 24"),
    "unknown dtype": (changed(a={"dtype": "F99"}), bytes(29), "a: dtype 'F99' is unknown; known: F64, F32"),
    "missing field": ({"a": {"dtype": "F32", "shape": []}}, bytes(4), "a: must have exactly dtype, shape"),
    "extra field": (changed(a={"scale": 1}), bytes(29), "a: must have exactly"),
    "row is a list": ({"a": []}, b"", "a: must have exactly"),
    "metadata not strings": ({"__metadata__": {"n": 1}, **GOOD}, bytes(29), "must map strings to strings"),
    "duplicate key": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        bytes(1),
        "header names a twice",
    ),
    "not UTF-8": (b'{"\xff":1}', b"", "header is not UTF-8 at byte 10"),
    "not JSON": (b'{"a": ', b"", "header is not JSON"),
    "not an object": (b"[1, 2]", b"", "does not begin with `{`"),
    "nested without end": (b'{"a":' * 100_000, b"", "header is not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_header_is_one_error_that_names_file_and_reason(case: str, tmp_path: Path) -> None:
    header, data, reason = BAD[case]
    path = put(tmp_path / "m.safetensors", header, data)
    with pytest.raises(SourceError, match=reason) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")


# The reference takes unknown fields, and the last of two equal names; we cannot know which of the two is meant.
@pytest.mark.parametrize("case", [c for c in BAD if c not in ("extra field", "duplicate key")])
def test_what_we_refuse_the_reference_refuses_too(case: str, tmp_path: Path) -> None:
    header, data, _ = BAD[case]
    path = put(tmp_path / "m.safetensors", header, data)
    with pytest.raises((SafetensorError, UnicodeDecodeError)), safe_open(path, "np") as file:
        file.keys()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n", "Git-LFS pointer.*`git lfs pull`"),
        (b"", "an empty file"),
        (b"abc", "truncated, or not a safetensors file: 3 bytes"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "the header alone should take 1099511627776"),
    ],
)
def test_file_that_is_something_else_says_what(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=reason):
        read_header(tmp_path / "m.safetensors")


def test_header_above_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)
    with pytest.raises(SourceError, match="header of 200000000 bytes; at most 100000000"):
        read_header(path)


def test_missing_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.safetensors: cannot be opened"):
        read_header(tmp_path / "none.safetensors")


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f16": rng.standard_normal((3, 5)).astype(np.float16),
        "f32": np.array(2.5, np.float32),
        "i8": rng.integers(-128, 127, (2, 7, 3), np.int8),
        "empty": np.zeros((0, 4), np.float64),
        "bool": np.array([True, False, True]),
        "bf16": rng.standard_normal((4, 3)).astype(ml_dtypes.bfloat16),
        "fp8": rng.standard_normal(11).astype(ml_dtypes.float8_e4m3fn),
    }
    save_file(arrays, tmp_path / "m.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.header.metadata == {"format": "pt"}
    assert file.specs["bf16"] == TensorSpec("bf16", (4, 3), "bfloat16")
    for name, array in arrays.items():
        got = file.read(name)
        assert got.shape == array.shape
        assert got.dtype == DTYPES[file.specs[name].dtype].storage
        assert got.tobytes() == array.tobytes()
    assert file.read_rows("i8", 1, 2).tobytes() == arrays["i8"][1:2].tobytes()


def test_header_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    arrays = {f"model.layers.{i}.weight": np.full(1, i, np.int32) for i in range(3000)}
    save_file(arrays, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.read("model.layers.2999.weight") == 2999


def test_file_cut_after_opening_is_a_source_error(tmp_path: Path) -> None:
    save_file({"a": np.zeros(100, np.float32)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    with (tmp_path / "m.safetensors").open("r+b") as handle:
        handle.truncate(200)
    with pytest.raises(SourceError, match="changed since it was opened"):
        file.read("a")


def test_file_written_anew_while_a_tensor_is_read_is_a_source_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"w": np.arange(4096, dtype=np.uint8)}))
    file = SafetensorsFile(path)

    def take(nbytes: int) -> np.ndarray:
        os.utime(path, ns=(0, 0))
        return np.empty(nbytes, np.uint8)

    with pytest.raises(SourceError, match="changed since it was opened"):
        list(file.pieces("w", 1000, take))


def test_layout_is_read_by_the_reference_and_packs_four_bits(tmp_path: Path) -> None:
    specs = [
        TensorSpec("codes", (3, 10), "int4"),
        TensorSpec("w", (3, 5), "float16"),
        TensorSpec("scale", (), "float32"),
        TensorSpec("bias", (7,), "int8"),
    ]
    header, offsets, total = layout(specs, {"format": "pt", "by": "é"})
    rng = np.random.default_rng(1)
    arrays = {s.name: rng.integers(0, 100, stored_shape(s)).astype(DTYPES[s.dtype].storage) for s in specs}
    blob = bytearray(total)
    blob[: len(header)] = header
    for name, array in arrays.items():
        blob[offsets[name] : offsets[name] + array.nbytes] = array.tobytes()
    (tmp_path / "m.safetensors").write_bytes(blob)
    back = load_file(tmp_path / "m.safetensors")
    assert back["codes"].shape == (3, 5)
    assert {n: a.tobytes() for n, a in back.items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert read_header(tmp_path / "m.safetensors").metadata == {"by": "é", "format": "pt"}


def test_layout_is_deterministic_and_aligned() -> None:
    specs = [TensorSpec("b", (3,), "int8"), TensorSpec("a", (2,), "float32"), TensorSpec("c", (5,), "bfloat16")]
    header, offsets, total = layout(specs, {"y": "1", "x": "2"})
    assert (header, offsets, total) == layout(list(specs), {"x": "2", "y": "1"})
    assert len(header) % 64 == 0
    assert list(offsets) == ["a", "c", "b"]
    assert all(offsets[s.name] % (DTYPES[s.dtype].bits // 8) == 0 for s in specs)
    assert len(layout(specs, align=4096)[0]) == 4096


def test_headers_of_a_405b_checkpoint_open_fast_and_hold_every_weight(tmp_path: Path) -> None:
    specs = llama_specs(LLAMA_405B)
    root = write_sparse(tmp_path / "big", LLAMA_405B, specs)
    assert sum(path.stat().st_blocks for path in root.iterdir()) * 512 < 20 << 20
    begin = time.perf_counter()
    source = open_source(root)
    seconds = time.perf_counter() - begin
    assert source.specs == {s.name: s for s in specs}
    assert sum(s.size for s in source.specs.values()) == 405_853_388_800
    assert seconds < 1.0  # 0.08 s on an idle core
