"""Damaged and contradictory distributed checkpoints: every problem named in one error before anything is read."""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.sources.weights.dcp import Dcp
from bridge.sources.weights.dcp_metadata import METADATA, read_index
from bridge.sources.weights.distributed import distributed
from tests.sources.weights.dcp_saves import Box, bits, change_metadata, read, save

ROWS: list[Box] = [((0, 0), (4, 3)), ((4, 0), (1, 3))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two files: `__0_0` holds the first rows and `a`, `__0_1` the last row."""
    state = {f"layers.{n}.w": torch.full((5, 3), n, dtype=torch.float32) for n in range(3)} | {"a": torch.ones(50, 70)}
    boxes = {f"layers.{n}.w": ROWS for n in range(3)}
    return save(tmp_path / "c", state, boxes, single_file_per_rank=False)


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        Dcp(open_folder(path))
    assert str(caught.value).startswith(f"{path}")
    return str(caught.value)


def file_of(path: Path, name: str, offset: tuple[int, ...]) -> Path:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    found = [info for key, info in metadata.storage_data.items() if key.fqn == name and key.offset == offset]
    return path / found[0].relative_path


def test_missing_file_names_its_tensors(path: Path) -> None:
    gone = file_of(path, "layers.1.w", (4, 0))
    gone.unlink()
    assert f"{gone.name}: missing, though .metadata names it; copy it again (layers.1.w)" in refusal(path)


def test_all_problems_are_in_one_error(path: Path) -> None:
    file_of(path, "layers.1.w", (4, 0)).unlink()
    cut = file_of(path, "a", (0, 0))
    cut.write_bytes(cut.read_bytes()[:3000])
    message = refusal(path)
    assert "2 problems" in message and "missing" in message
    assert (
        f"{cut.name}: shorter than .metadata says: it has 3000 bytes, .metadata places more there; copy it again (a)"
        in message
    )


def test_layers_of_one_missing_file_are_folded(tmp_path: Path) -> None:
    save(tmp_path / "c", {f"layers.{n}.w": torch.ones(2) for n in range(12)})
    (tmp_path / "c" / "__0_0.distcp").unlink()
    assert "(layers.{0..11}.w)" in refusal(tmp_path / "c")


def test_no_index(path: Path) -> None:
    (path / ".metadata").unlink()
    assert "no .metadata: the save did not finish" in refusal(path)
    with pytest.raises(SourceError, match=r"no \.metadata"):
        distributed(open_folder(path))


def test_index_for_every_rank_is_refused_by_name(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(str(tmp_path / "c"))
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert "saved with use_collectives=False: its index lies in 1 files (__0.metadata)" in refusal(tmp_path / "c")


def test_items_of_extensions_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(3)})

    def change(metadata: Any) -> None:
        for key, info in list(metadata.storage_data.items()):
            metadata.storage_data[key] = replace(info, transform_descriptors=["stream.zstd/1"])

    change_metadata(tmp_path / "c", change)
    assert "stored through stream.zstd/1, which is not supported" in refusal(tmp_path / "c")


def placed(path: Path, name: Callable[[str], str]) -> None:
    """Change where `.metadata` says that the items of `a` are."""

    def change(metadata: Any) -> None:
        for key, info in list(metadata.storage_data.items()):
            if key.fqn == "a":
                metadata.storage_data[key] = replace(info, relative_path=name(info.relative_path))

    change_metadata(path, change)


@pytest.mark.parametrize("outside", ["../other.distcp", "/etc/passwd", "sub/../../x"])
def test_files_outside_are_not_read(path: Path, outside: str) -> None:
    (path.parent / "other.distcp").write_bytes(file_of(path, "a", (0, 0)).read_bytes())
    placed(path, lambda _: outside)
    assert f"{outside}: outside the checkpoint's directory, where nothing is read (a)" in refusal(path)


def test_a_name_with_backslashes_is_refused_as_such(path: Path) -> None:
    placed(path, lambda _: "sub\\x")
    assert "sub\\x: with a backslash, which is a folder on Windows alone" in refusal(path)


def test_a_file_that_is_named_by_a_way_out_and_back_is_inside(path: Path) -> None:
    (path / "sub").mkdir()
    placed(path, lambda name: f"./sub/../{name}")
    theirs = torch.empty(50, 70)
    dcp.load({"a": theirs}, checkpoint_id=str(path), no_dist=True)
    assert torch.equal(theirs, torch.ones(50, 70))
    assert (read(Dcp(open_folder(path)), "a", 0, 3500) == bits(theirs).ravel()).all()


def boxes(*found: Box) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for n in range(3):
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in found]
            metadata.state_dict_metadata[f"layers.{n}.w"].chunks = chunks

    return change


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ROWS[:1], "its 1 parts cover only 12 of 15 elements"),
        ([], "its 0 parts cover only 0 of 15 elements"),
        ([*ROWS, ROWS[1]], "its 3 parts overlap"),
        ([((0, 0), (3, 3)), ((4, 0), (1, 3))], "its 2 parts cover only 12 of 15 elements"),
        ([((0, 0), (4, 3)), ((4, 0), (2, 3))], "a part of (2, 3) at (4, 0), which lies outside"),
        ([((0, 0), (4, 3)), ((4,), (1,))], "a part with 1 axes"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "described, but stored nowhere at (2, 0)"),
    ],
)
def test_chunks_that_do_not_tile_the_tensor(path: Path, found: list[Box], why: str) -> None:
    change_metadata(path, boxes(*found))
    message = refusal(path)
    assert "layers.{0..2}.w: " in message and why in message and "problems" not in message


def test_dtype_that_would_need_more_bytes_is_found_at_once(path: Path) -> None:
    def change(metadata: Any) -> None:
        properties = metadata.state_dict_metadata["a"].properties
        metadata.state_dict_metadata["a"].properties = replace(properties, dtype=torch.float64)

    change_metadata(path, change)
    assert "too short for the shapes and dtypes that .metadata gives (a)" in refusal(path)


@pytest.mark.parametrize("name", ["dtype", "shape"])
def test_item_that_is_not_what_the_index_says_is_refused_when_read(name: str, path: Path) -> None:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["a"]
        if name == "dtype":
            entry.properties = replace(entry.properties, dtype=torch.bfloat16)
        else:
            entry.size = torch.Size([70, 50])
            entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([70, 50]))]

    change_metadata(path, change)
    container = Dcp(open_folder(path))
    with pytest.raises(SourceError, match=r"a at \(0, 0\): the index says .* they do not belong together"):
        read(container, "a")


def test_chunk_that_points_to_the_item_of_another_is_refused_when_read(path: Path) -> None:
    def change(metadata: Any) -> None:
        storage = metadata.storage_data
        first, second = (key for key in storage if key.fqn == "layers.1.w")
        storage[second] = storage[first]

    change_metadata(path, change)
    container = Dcp(open_folder(path))
    with pytest.raises(SourceError, match=r"layers\.1\.w at \(., 0\): the index says float32 \(., 3\), the file holds"):
        read(container, "layers.1.w")


def test_safetensors_item_of_another_dtype_than_the_index_says_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 3), "b": torch.ones(2)}
    path = save(tmp_path / "c", state, serialization_format=SerializationFormat.SAFETENSORS)

    def change(metadata: Any) -> None:
        properties = metadata.state_dict_metadata["w"].properties
        metadata.state_dict_metadata["w"].properties = replace(properties, dtype=torch.int32)

    change_metadata(path, change)
    assert ".metadata places w there as int32 (4, 3), its header has it as float32 (4, 3)" in refusal(path)
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-4])
    assert "shorter than its tensors: tensors take 56 bytes, the file holds 52" in refusal(path)


def test_item_that_is_no_tensor_is_refused_when_read(path: Path) -> None:
    file = file_of(path, "a", (0, 0))
    nbytes = file.stat().st_size
    torch.save(["x"] * 7, file)
    short = file.read_bytes()
    file.write_bytes(bytes(nbytes - len(short)) + short)
    with pytest.raises(SourceError, match=r"a at \(0, 0\)"):
        read(Dcp(open_folder(path)), "a")


def test_file_that_changed_is_noticed(path: Path) -> None:
    container = Dcp(open_folder(path))
    file = file_of(path, "a", (0, 0))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(SourceError, match="changed since it was opened"):
        read(container, "a")


def test_unknown_backend_of_megatron_is_named(path: Path) -> None:
    (path / "metadata.json").write_text('{"sharded_backend": "tensorstore"}')
    with pytest.raises(SourceError, match=r"the backend 'tensorstore'; known: torch_dist, zarr"):
        distributed(open_folder(path))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": 1}, "it has no Metadata with state_dict_metadata"),
        (torch.distributed.checkpoint.metadata.Metadata({}, None, None), "it has no Metadata with storage_data"),
        (torch.distributed.checkpoint.metadata.Metadata({"w": 3}, None, {}), "neither a tensor nor an object"),
        (torch.distributed.checkpoint.metadata.Metadata({3: 3}, None, {}), "3: its name is not a text"),
        (torch.distributed.checkpoint.metadata.Metadata({}, None, {1: 2}), "not a table of _StorageInfo"),
        (torch.nn.Linear(2, 3), "asks for torch.nn.modules.linear.Linear, which is not part of a checkpoint's index"),
    ],
)
def test_pickle_that_is_no_index(path: Path, value: Any, why: str) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(value))
    assert why in refusal(path)


def test_every_name_of_the_table_is_a_record_or_plain() -> None:
    assert not [name for name, value in METADATA.names.items() if type(value).__name__ in ("function", "type")]


def damaged(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(found))
        if rng.random() < 0.7:
            found[at] = rng.randrange(256)
        else:
            found[at : at + 4] = struct.pack("<I", rng.choice([0xFFFFFFFF, 0, 1 << 20]))
    return bytes(found)


def test_damaged_index_reads_or_is_refused(path: Path) -> None:
    data, rng, refused = (path / ".metadata").read_bytes(), random.Random(0), 0
    for _ in range(400):
        try:
            index = read_index(damaged(data, rng))
            refused += bool(index.problems)
        except SourceError:
            refused += 1
    assert refused > 150


@pytest.mark.slow
def test_damaged_items_read_or_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(4, 3)}, {"w": [((0, 0), (4, 1)), ((0, 1), (4, 2))]})
    file, rng = path / "__0_0.distcp", random.Random(0)
    data, refused = file.read_bytes(), 0
    for _ in range(300):
        file.write_bytes(damaged(data, rng))
        try:
            assert read(Dcp(open_folder(path)), "w").shape == (12,)
        except SourceError:
            refused += 1
    assert refused > 50
