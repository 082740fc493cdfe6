"""Distributed checkpoints: equal to what torch saved, in whichever parts, read by rows and without torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.core.formats import torch_file as torch_zip
from bridge.sources.weights import dcp as ours
from bridge.sources.weights.containers import tiling_problem
from bridge.sources.weights.dcp import Dcp
from bridge.sources.weights.dcp_safetensors import ShardedSafetensors
from tests.sources.weights.dcp_saves import Box, Cutting, bits, change_metadata, on_ranks, read, same, save


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {
        "layers.10.w": torch.randn(6, 10),
        "layers.2.w": torch.randn(10, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "vector": torch.randn(7),
        "flags": torch.tensor([True, False, True]),
    }
    for name in ("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "float8_e4m3fn",
                 "float8_e5m2", "uint16", "uint32", "uint64"):  # fmt: skip
        state[name] = torch.arange(15).reshape(5, 3).to(getattr(torch, name))
    return state


def opened(path: Path) -> Dcp:
    return Dcp(open_folder(path))


def test_every_kind_of_tensor_reads_as_saved(tmp_path: Path) -> None:
    state = every_kind()
    container = opened(save(tmp_path / "c", state))
    same(container, state)
    names = list(container.specs)
    assert names.index("layers.2.w") < names.index("layers.10.w")


def test_torch_is_not_imported(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(3, 2)})
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from bridge.core.files.archive import open_folder; from bridge.sources.weights.dcp import Dcp\n"
        "c = Dcp(open_folder(Path(sys.argv[1])))\n"
        "print(c.read_flat('w', 0, 6, np.empty(6, np.float32)).tolist(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[1.0,", *["1.0,"] * 4, "1.0]", "False"]


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Return the boxes between cuts along every axis."""
    spans = [list(itertools.pairwise([0, *at, n])) for at, n in zip(cuts, shape, strict=True)]
    return [
        (tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
        for box in itertools.product(*spans)
    ]


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "rows": ((13, 6), grid((13, 6), [[7], []])),
    "columns": ((5, 9), grid((5, 9), [[], [4, 7]])),
    "rows and columns": ((6, 10), grid((6, 10), [[2, 3], [7]])),
    "vector": ((11,), grid((11,), [[3, 4]])),
    "layers one by one": ((3, 6, 10), grid((3, 6, 10), [[1, 2], [], []])),
    "layers and rows": ((3, 6, 10), grid((3, 6, 10), [[1, 2], [2, 5], []])),
    "layers and columns": ((3, 6, 10), grid((3, 6, 10), [[1, 2], [], [4]])),
    "two stages and columns": ((5, 6, 10), grid((5, 6, 10), [[3], [], [4]])),
    "rows of all layers": ((3, 8, 5), grid((3, 8, 5), [[], [3], []])),
    "experts": ((2, 5, 4, 3), grid((2, 5, 4, 3), [[1], [2], [], []])),
    "everything at once": ((2, 5, 4, 7), grid((2, 5, 4, 7), [[1], [2], [3], [5]])),
    "uneven": ((4, 6), [((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (2, 4)), ((3, 2), (1, 4))]),
    "with an empty part": ((4, 3), [((0, 0), (4, 3)), ((4, 0), (0, 3))]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_elements_of_any_layout_are_those_of_the_tensor(layout: str, tmp_path: Path) -> None:
    shape, boxes = LAYOUTS[layout]
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    container = opened(save(tmp_path / "c", {"w": tensor}, {"w": boxes}, thread_count=2))
    flat, generator = bits(tensor).ravel(), np.random.default_rng(0)
    rows = range(0, flat.size + 1, shape[-1])
    anything = (sorted(generator.integers(0, flat.size + 1, 2).tolist()) for _ in range(200))
    for begin, end in itertools.chain(itertools.combinations(rows, 2), anything):
        assert np.array_equal(read(container, "w", begin, end), flat[begin:end]), (begin, end)


def test_place_says_where_each_row_lies(tmp_path: Path) -> None:
    tensor = torch.arange(30, dtype=torch.int32).reshape(5, 6)
    container = opened(save(tmp_path / "c", {"w": tensor}, {"w": grid((5, 6), [[3], [4]])}))
    places = [container.place("w", row * 6) for row in range(5)]
    assert {file for file, _ in places} == {str(tmp_path / "c/__0_0.distcp")}
    offsets = [offset for _, offset in places]
    assert offsets[1] - offsets[0] == offsets[2] - offsets[1] == offsets[4] - offsets[3] == 16
    assert offsets[3] > offsets[2] + 16


def test_opening_opens_no_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w.{i}": torch.full((3,), i, dtype=torch.int32) for i in range(20)}
    save(tmp_path / "c", state)
    seen: list[Any] = []
    real = ours.open_saved
    monkeypatch.setattr(ours, "open_saved", lambda span, **more: seen.append(span) or real(span, **more))
    container = opened(tmp_path / "c")
    assert not seen
    read(container, "w.7")
    read(container, "w.7")
    assert len(seen) == 1


def test_items_with_one_pickle_keep_their_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w.{i}": torch.full((3,), i, dtype=torch.int32) for i in range(20)}
    state["other"] = torch.arange(6, dtype=torch.int16)
    loaded: list[bytes] = []
    real = torch_zip.load_bytes
    monkeypatch.setattr(torch_zip, "load_bytes", lambda data, table: loaded.append(data) or real(data, table))
    container = opened(save(tmp_path / "c", state))
    for name, tensor in state.items():
        assert read(container, name).tolist() == tensor.tolist()
    assert len(loaded) == 2


@pytest.mark.slow
def test_reading_in_pieces_takes_the_memory_of_pieces(tmp_path: Path) -> None:
    shape = (64, 1024, 128)  # 32 MiB
    boxes = grid(shape, [[20], [], [50]])
    container = opened(save(tmp_path / "c", {"w": torch.arange(int(np.prod(shape))).view(shape).int()}, {"w": boxes}))
    out = np.empty(1 << 16, np.int32)
    tracemalloc.start()
    try:
        for begin in range(0, container.specs["w"].size, len(out)):
            container.read_flat("w", begin, begin + len(out), out)
            assert out[0] == begin and out[-1] == begin + len(out) - 1
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_threads_read_the_same_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(6000, dtype=torch.int32).reshape(60, 100)
    container = opened(save(tmp_path / "c", {"w": tensor}, {"w": grid((60, 100), [[17, 40], [30]])}))
    wrong: list[int] = []

    def work(begin: int) -> None:
        for row in range(begin, 60, 4):
            if read(container, "w", row * 100, row * 100 + 100).tolist() != tensor[row].tolist():
                wrong.append(row)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_training_state_is_skipped_and_counted_and_objects_are_listed(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(3, 2),
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.5}]},
        "lr_scheduler": {"last_epoch": 4},
        "chained_0.optimizer.exp_avg.w": torch.ones(5),
        "decoder._extra_state/shard_0_2": [None],
    }
    save(tmp_path / "c", state)

    def pad(metadata: Any) -> None:
        """Megatron's optimizer saves padded buckets of which no chunks tile the whole."""
        metadata.state_dict_metadata["chained_0.optimizer.exp_avg.w"].size = torch.Size([64])

    change_metadata(tmp_path / "c", pad)
    container = opened(tmp_path / "c")
    assert list(container.specs) == ["w"]
    assert container.skipped["optimizer"] > 24 + 256
    assert set(container.skipped) == {"optimizer", "lr_scheduler"}
    assert list(container.objects) == ["decoder._extra_state/shard_0_2"]
    assert container.open_object("decoder._extra_state/shard_0_2").value == [None]


def test_safetensors_items_are_found_by_their_head(tmp_path: Path) -> None:
    state = {name: every_kind()[name] for name in ("layers.10.w", "bfloat16", "scalar", "int8")}
    save(tmp_path / "c", state, serialization_format=SerializationFormat.SAFETENSORS)
    same(opened(tmp_path / "c"), state)


def _as_old(metadata: Any, version: str) -> None:
    """Take away what the index of an older torch does not have."""
    metadata.__dict__.pop("version")
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    if version < "2.6":
        metadata.__dict__.pop("storage_meta")
    if version < "2.3":
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties = OldProperties(dtype=entry.properties.dtype)


@pytest.mark.parametrize("version", ["2.1", "2.3", "2.6"])
def test_indexes_of_older_torch_read(version: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.0)}
    save(tmp_path / "c", state)
    change_metadata(tmp_path / "c", lambda metadata: _as_old(metadata, version))
    assert (b"sharded_tensor" in (tmp_path / "c" / ".metadata").read_bytes()) == (version == "2.1")
    same(opened(tmp_path / "c"), state)


def test_plans_that_megatron_hangs_on_the_index_are_not_needed(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(2)})

    def hang(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["w"].chunks[0]
        data = TensorWriteData(chunk, metadata.state_dict_metadata["w"].properties, torch.Size([2]))
        item = WriteItem(MetadataIndex("w", torch.Size([0])), WriteItemType.SHARD, tensor_data=data)
        metadata.all_local_plans = [SavePlan([item], storage_data=_StoragePrefix("__0_"))]
        metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2,)}}

    change_metadata(tmp_path / "c", hang)
    same(opened(tmp_path / "c"), {"w": torch.ones(2)})


def test_path_in_the_index_is_data(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    assert b"PosixPath" in (tmp_path / "c" / ".metadata").read_bytes()
    same(opened(tmp_path / "c"), {"w": torch.ones(2)})


def test_numbers_in_the_index_are_hints(tmp_path: Path) -> None:
    boxes = grid((4, 3), [[1, 3], []])
    tensor = torch.arange(12.0).reshape(4, 3)
    save(tmp_path / "c", {"w": tensor}, {"w": boxes})

    def confuse(metadata: Any) -> None:
        for key in metadata.storage_data:
            object.__setattr__(key, "index", None if key.offset[0] else 2)

    change_metadata(tmp_path / "c", confuse)
    same(opened(tmp_path / "c"), {"w": tensor})


def hugging_face_shards(path: Path, boxes: dict[str, list[Box]] | None = None) -> Path:
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    state = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5).to(torch.int16)}
    dcp.save(state, storage_writer=writer, planner=Cutting(boxes or {}), no_dist=True)
    return path


def test_shards_of_the_hugging_face_writer_are_joined_by_their_headers(tmp_path: Path) -> None:
    """Two ranks with unequal rows: the writer itself, once for each, numbers the files differently."""
    hugging_face_shards(tmp_path / "c", {"w": [((0, 0), (3, 3))], "b": [((0,), (5,))]})
    hugging_face_shards(tmp_path / "other", {"w": [((3, 0), (1, 3))], "b": [((5,), (0,))]})
    (other,) = (tmp_path / "other").iterdir()
    other.rename(tmp_path / "c" / other.name.replace("shard-00001", "shard-00002"))
    container = ShardedSafetensors(open_folder(tmp_path / "c"))
    assert [span.path.name[:11] for span in container.files] == ["shard-00001", "shard-00002"]
    same(container, {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5).to(torch.int16)})


def test_missing_shard_of_the_hugging_face_writer_is_noticed(tmp_path: Path) -> None:
    hugging_face_shards(tmp_path / "c", {"w": [((3, 0), (1, 3))]})
    with pytest.raises(SourceError, match=r"w: has shape \(4, 3\), but its 1 parts cover only 3 of 12 elements: files"):
        ShardedSafetensors(open_folder(tmp_path / "c"))


@pytest.mark.slow
def test_ranks_of_fsdp_and_tensor_parallelism(tmp_path: Path) -> None:
    on_ranks(SHARDED, 2, tmp_path)
    torch.manual_seed(1)
    want = {
        "rows": torch.randn(13, 6),
        "columns": torch.randn(5, 9),
        "stacked": torch.randn(3, 4, 10).to(torch.bfloat16),
        "whole": torch.randn(7),
    }
    container = opened(tmp_path / "fs")
    assert [span.path.name for span in container.files] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    same(container, want)
    same(ShardedSafetensors(open_folder(tmp_path / "hf")), want)


SHARDED = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (count,))
    cut = lambda tensor, how: distribute_tensor(tensor, mesh, [how])
    state = {
        "rows": cut(torch.randn(13, 6), Shard(0)),
        "columns": cut(torch.randn(5, 9), Shard(1)),
        "stacked": cut(torch.randn(3, 4, 10).to(torch.bfloat16), Shard(2)),
        "whole": cut(torch.randn(7), Replicate()),
    }
    dcp.save(state, checkpoint_id=arguments[0] + "/fs")
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(arguments[0] + "/hf", save_distributed=True))
"""


def test_tilings_are_told_from_everything_else() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in generator.integers(1, 5, generator.integers(1, 4)))
        boxes = []
        for _ in range(generator.integers(1, 5)):
            at = tuple(int(generator.integers(0, n)) for n in shape)
            boxes.append((at, tuple(int(generator.integers(1, n - b + 1)) for b, n in zip(at, shape, strict=True))))
        if generator.random() < 0.5:
            cuts = [sorted({int(c) for c in generator.integers(0, n + 1, 2)} - {0, n}) for n in shape]
            boxes = grid(shape, cuts)
        count = np.zeros(shape, int)
        for at, size in boxes:
            count[tuple(slice(b, b + n) for b, n in zip(at, size, strict=True))] += 1
        assert (tiling_problem(shape, boxes) == "") == bool((count == 1).all())
