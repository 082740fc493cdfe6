"""The zarr backend of older Megatron: plain chunks of a grid, edges stored whole, bfloat16 under its own word."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.sources.weights.distributed import distributed
from bridge.sources.weights.zarr import Zarr
from tests.sources.weights.dcp_saves import bits, read, same


def array(root: Path, name: str, tensor: torch.Tensor, chunks: tuple[int, ...], **header: Any) -> None:
    """Write as tensorstore's zarr driver does without a compressor; there is filler beyond the tensor's edge."""
    values, code = bits(tensor), "bfloat16" if tensor.dtype == torch.bfloat16 else bits(tensor).dtype.str
    (root / name).mkdir(parents=True)
    described = {
        "zarr_format": 2, "shape": list(values.shape), "chunks": list(chunks), "dtype": code, "compressor": None,
        "fill_value": None, "filters": None, "order": "C", **header,
    }  # fmt: skip
    (root / name / ".zarray").write_text(json.dumps(described))
    for index in itertools.product(*(range(-(-n // step)) for n, step in zip(values.shape, chunks, strict=True))):
        chunk = np.full(chunks, 7, values.dtype)
        box = tuple(slice(i * step, (i + 1) * step) for i, step in zip(index, chunks, strict=True))
        part = values[box]
        chunk[tuple(slice(0, n) for n in part.shape)] = part
        (root / name / (".".join(map(str, index)) or "0")).write_bytes(chunk.tobytes())


STATE = {
    "decoder.layers.mlp.linear_fc1.weight": torch.arange(3 * 8 * 5).reshape(3, 8, 5).to(torch.bfloat16),
    "decoder.layers.mlp.linear_fc2.weight": torch.arange(3 * 5 * 9.0).reshape(3, 5, 9),
    "norm": torch.arange(7, dtype=torch.int32),
    "scalar": torch.tensor(3.5),
}
CHUNKS = [(1, 4, 5), (2, 5, 4), (3,), ()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for (name, tensor), chunks in zip(STATE.items(), CHUNKS, strict=True):
        array(tmp_path / "c", name, tensor, chunks)
    array(tmp_path / "c", "optimizer.state.exp_avg.norm", STATE["norm"], (7,))
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    return tmp_path / "c"


def test_chunks_are_the_whole_tensors(root: Path) -> None:
    container = distributed(open_folder(root))
    assert isinstance(container, Zarr)
    same(container, STATE)


def test_any_elements_are_those_of_the_tensor(root: Path) -> None:
    container = distributed(open_folder(root))
    assert container is not None
    name = "decoder.layers.mlp.linear_fc2.weight"
    flat = bits(STATE[name]).ravel()
    for begin, end in itertools.combinations(range(0, flat.size + 1, 3), 2):
        assert np.array_equal(read(container, name, begin, end), flat[begin:end])


def refusal(root: Path) -> str:
    with pytest.raises(SourceError) as caught:
        distributed(open_folder(root))
    return str(caught.value)


def test_missing_and_truncated_chunks_are_named_together(root: Path) -> None:
    (root / "norm" / "1").unlink()
    (root / "scalar" / "0").write_bytes(b"12")
    message = refusal(root)
    assert "norm: chunks 1 are missing" in message
    assert "scalar: chunks 0: 2 bytes, not the 4 of () in float32" in message


def test_a_missing_chunk_that_zarr_would_fill_is_told_so(tmp_path: Path) -> None:
    array(tmp_path, "w", torch.ones(3), (2,), fill_value=0.0)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (tmp_path / "w" / "1").unlink()
    assert "w: chunks 1 are missing, which zarr reads as 0.0" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"compressor": {"id": "blosc"}}, "stored with compressor {'id': 'blosc'}; save it without"),
        ({"filters": [{"id": "delta"}]}, "stored with filters [{'id': 'delta'}]; save it without"),
        ({"zarr_format": 3}, "zarr_format is 3; only 2 is read"),
        ({"order": "F"}, "stored in order 'F'; save it in order 'C'"),
        ({"shape": [3, 3]}, "chunks (2,) do not fit shape (3, 3)"),
        ({"dtype": ">f4"}, "dtype '>f4' is not supported"),
        ({"dtype": "nonsense"}, "dtype 'nonsense' is not supported"),
        ({"shape": [-3]}, "must be non-negative integers"),
        ({"shape": [1 << 40]}, "549755813888 chunks; at most"),
    ],
)
def test_arrays_that_are_not_plain_are_refused(tmp_path: Path, header: dict[str, Any], why: str) -> None:
    array(tmp_path, "w", torch.ones(3), (2,), **header)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert why in refusal(tmp_path)
