"""Items and pickles are torch's own, byte for byte."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.serialization

from bridge.core.files.span import Span, span_of
from bridge.core.formats.dcp_items import Item, object_item, tensor_item
from bridge.core.formats.pickle_writer import pickled
from bridge.core.formats.zip_directory import Ends, read_directory
from bridge.core.values import TensorSpec


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(), (3,), (300, 2), (2, 3, 5), (2, 3, 1, 7), (70_000,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_a_tensor_is_what_torch_writes(shape: tuple[int, ...], dtype: str) -> None:
    tensor = torch.randn(shape).to(getattr(torch, dtype))
    item = tensor_item(TensorSpec("any", shape, dtype))
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert item.head + data + item.tail == saved(tensor)
    assert item.length == len(saved(tensor)) and len(item.head) % 64 == 0


@pytest.mark.parametrize("value", [[None], {}, {"checkpoint_version": 3.0, "iteration": 0}, {"a": [1, -2, 1 << 40]}])
def test_plain_data_are_what_torch_writes(value: Any) -> None:
    assert object_item(value) == saved(value)


def test_a_repeated_word_is_recalled_and_loads() -> None:
    value = [{"name": "x" * 300, "size": (n, -n, True, None)} for n in range(2500)]
    assert pickle.loads(pickled(value)) == value
    assert len(pickled(value)) < 100_000


def test_an_item_beyond_four_gigabytes_has_wide_fields(tmp_path: Any) -> None:
    # torch itself reads a file of that size as it is laid out here: sparse, so it takes no space.
    spec = TensorSpec("any", (1 << 31, 3), "int8")
    item = tensor_item(spec)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(item.head + b"\1\2\3")
        file.seek(len(item.head) + item.nbytes - 1)
        file.write(b"\7" + item.tail)
    assert path.stat().st_size == item.length
    loaded = torch.load(path, mmap=True)
    assert loaded.shape == spec.shape and loaded[0].tolist() == [1, 2, 3] and loaded[-1, -1] == 7


def test_the_directory_is_read_back(tmp_path: Any) -> None:
    item: Item = tensor_item(TensorSpec("any", (5, 7), "float32"))
    data = np.arange(35, dtype=np.float32)
    path = tmp_path / "item"
    path.write_bytes(item.head + data.tobytes() + item.tail)
    span: Span = span_of(path)
    with span.opened() as fd:
        member = read_directory(Ends(fd, span))["archive/data/0"]
    assert (member.offset, member.nbytes, member.crc) == (len(item.head), 140, 0)
