"""What a hostile pickle can do to any of the tables: nothing. Nothing runs, and memory stays that of the file."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import io
import os
import pickle
import re
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bridge.core.errors import SourceError
from bridge.core.files.span import span_of
from bridge.core.formats import unpickle
from bridge.core.formats.inert_pickle import Record, inert
from bridge.core.formats.torch_file import open_saved
from bridge.core.formats.torch_pickle import WEIGHTS
from bridge.core.formats.unpickle import Table, load_bytes
from bridge.sources.weights.dcp_metadata import METADATA

CLOSED = {"weights": WEIGHTS, "metadata": METADATA}  # tables that refuse what they do not know
TABLES = ["weights", "metadata", "inert"]


def table(name: str) -> Table:
    return CLOSED.get(name) or inert()


@pytest.fixture(params=TABLES)
def any_table(request: pytest.FixtureRequest) -> Table:
    return table(request.param)


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def attacked(data: bytes, against: Table) -> str:
    with pytest.raises(SourceError) as caught:
        load_bytes(data, against)
    return str(caught.value)


PROGRAMS = [(os.system, "system"), (eval, "eval"), (subprocess.Popen, "Popen"), (__import__, "__import__")]
FUNCTIONS = [
    (getattr, "getattr"),
    (io.open, "open"),
    (pickle.loads, "loads"),
    (torch.load, "load"),
    (np.load, "load"),
    (collections.namedtuple, "namedtuple"),
]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(("function", "name"), PROGRAMS + FUNCTIONS)
@pytest.mark.parametrize("closed", CLOSED)
def test_functions_are_refused_by_name(tmp_path: Path, function: Any, name: str, protocol: int, closed: str) -> None:
    trace = tmp_path / "ran"
    message = attacked(pickle.dumps(Calls(function, f"touch {trace}"), protocol), CLOSED[closed])
    assert re.search(rf"the pickle asks for [\w.]+\.{name}, which", message)  # protocol 2 names are Python 2's
    assert "nothing was run" in message
    assert not trace.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(("function", "name"), FUNCTIONS)
def test_functions_are_records_where_everything_is(tmp_path: Path, function: Any, name: str, protocol: int) -> None:
    trace = tmp_path / "ran"
    value, _ = load_bytes(pickle.dumps(Calls(function, f"touch {trace}"), protocol), inert())
    assert isinstance(value, Record)
    assert (value.kind.rpartition(".")[2], value.args) == (name, (f"touch {trace}",))
    assert not trace.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(("function", "name"), PROGRAMS)
def test_what_runs_programs_is_told_even_where_everything_is_data(
    tmp_path: Path, function: Any, name: str, protocol: int
) -> None:
    trace = tmp_path / "ran"
    message = attacked(pickle.dumps(Calls(function, f"touch {trace}"), protocol), inert())
    assert re.search(rf"the pickle asks for \w+\.{name}, by which a file can run programs; nothing was run", message)
    assert not trace.exists()


def test_instances_by_the_old_opcode_are_refused_or_records() -> None:
    for closed in CLOSED.values():
        assert "asks for io.open" in attacked(b"(S'true'\niio\nopen\n.", closed)
    assert load_bytes(b"(S'true'\niio\nopen\n.", inert())[0].kind == "io.open"


def test_extension_codes_are_refused(any_table: Table) -> None:
    copyreg.add_extension("os", "system", 0x77)
    try:
        pickle.loads(b"\x80\x02\x82\x77.")  # fills the cache that the C unpickler would answer from
        assert "extension code 119" in attacked(b"\x80\x02\x82\x77X\x04\x00\x00\x00true\x85R.", any_table)
    finally:
        copyreg.remove_extension("os", "system", 0x77)


def test_only_a_set_is_added_to(any_table: Table) -> None:
    assert "adds items to an object that is not a set" in attacked(
        b"\x80\x04}(X\x02\x00\x00\x00ab\x90.", any_table
    )  # dicts would


def rule(name: str) -> bytes:
    return b"\x80\x02c" + name.encode() + b"\n"


STATES = [b"}X\x04\x00\x00\x00makeK\x01s", b"N}X\x05\x00\x00\x00dtypeK\x01s\x86", b"N}X\x04\x00\x00\x00kindK\x01s\x86",
          b"K\x01\x85"]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(
            (name, "weights")
            for name in ("torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "torch\nint8")
        ),
        *((name, "metadata") for name in ("torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata")),
        *((name, "inert") for name in ("os\nsystem", "_codecs\nencode", "torch\nSize")),
    ],
)
def test_build_cannot_change_a_rule(name: str, where: str, state: bytes, tmp_path: Path) -> None:
    attacked(rule(name) + state + b"b.", table(where))
    torch.save(collections.OrderedDict(a=torch.ones(3)), tmp_path / "m.bin")
    assert open_saved(span_of(tmp_path / "m.bin")).value["a"].shape == (3,)
    assert METADATA.names["torch.distributed.checkpoint.metadata", "Metadata"].kind.endswith("metadata.Metadata")


def test_huge_memo_index_takes_no_memory(any_table: Table) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load_bytes(b"\x80\x02Nr" + struct.pack("<I", 4_000_000_000) + b".", any_table)[0] is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b"N.",
    ],
)
def test_lengths_in_the_pickle_allocate_nothing(data: bytes, any_table: Table) -> None:
    assert "the pickle" in attacked(data, any_table)


@pytest.mark.parametrize("data", [b"", b".", b"\x80\x09N.", b"\x80\x02}q", b"\x80\x02R.", b"\x80\x02K\x01K\x02s."])
def test_broken_pickles_are_source_errors(data: bytes, any_table: Table) -> None:
    assert "the pickle is broken" in attacked(data, any_table)


def test_data_after_the_end_is_refused(any_table: Table) -> None:
    assert "3 bytes follow the end of the pickle" in attacked(pickle.dumps({}) + b"abc", any_table)


@pytest.mark.slow
def test_deep_nesting_is_refused_or_read_without_a_crash(any_table: Table) -> None:
    assert load_bytes(b"]" * 200_000 + b"a" * 199_999 + b".", any_table)[0]


def test_list_that_holds_itself_reads(any_table: Table) -> None:
    value, _ = load_bytes(b"\x80\x02]q\x00h\x00a.", any_table)
    assert value[0] is value


@pytest.mark.parametrize("pid", [b"Pabc\n.", b"\x80\x02(X\x07\x00\x00\x00storageNNNNtQ.", b"\x80\x02]q\x00h\x00aQ."])
def test_references_outside_that_are_no_storages_are_refused(pid: bytes, any_table: Table) -> None:
    assert "storage" in attacked(pid, any_table)


def test_one_storage_described_twice_is_refused() -> None:
    def reference(numel: bytes) -> bytes:
        return b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + numel + b"tQ"

    for known in (WEIGHTS, inert()):
        assert "described twice" in attacked(b"\x80\x02" + reference(b"K\x04") + reference(b"K\x05") + b"\x86.", known)


def test_names_in_the_file_cannot_take_memory() -> None:
    data = b"\x80\x02" + b"".join(f"cm\nn{n}\n0".encode() for n in range(3000)) + b"N."
    assert "names more than 2000 classes" in attacked(data, inert())


@pytest.mark.slow
@pytest.mark.parametrize("ends", [b"Ns.", b"(Nu.", b"\x90."], ids=["item", "items", "set"])
def test_keys_nested_too_deeply_for_hashing_are_refused(ends: bytes, any_table: Table) -> None:
    deep = b")" + b"\x85" * 150_000  # deeper than the stack of C
    begin = {b"Ns.": b"\x80\x04}" + deep, b"(Nu.": b"\x80\x04}(" + deep + b"Nu.", b"\x90.": b"\x80\x04\x8f(" + deep}[
        ends
    ]
    data = begin if ends == b"(Nu." else begin + ends
    assert "nested too deeply" in attacked(data, any_table)


@pytest.mark.parametrize("made", [b"]", b"}", b"\x8f", b"(", b"\x94", b")\x85"])
def test_objects_that_a_pickle_makes_are_bounded(made: bytes) -> None:
    """A byte that makes two hundred: lists, dicts, sets, marks, memos, tuples, of which a file may hold millions."""
    small = dataclasses.replace(WEIGHTS, most=1 << 20)
    assert "makes more than 1 MB of objects; save" in attacked(b"\x80\x04(N" + made * 50_000 + b"l.", small)


def test_the_pickles_of_a_legacy_file_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "m.pth", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(unpickle, "MAX_PICKLE", 200)  # the longest of them has 190 bytes
    with pytest.raises(SourceError, match="longer than 200; save"):
        open_saved(span_of(tmp_path / "m.pth"))


def test_an_index_of_many_tensors_is_within_bounds() -> None:
    """100,000 weights, and 100,000 tensors of an index in eight parts each, scaled down."""
    for table, value, count in (
        (WEIGHTS, {f"model.layers.{n}.weight": torch.zeros(1, 1) for n in range(100)}, 100_000),
        (METADATA, _index(100, 8), 100_000),
    ):
        reader = unpickle._Unpickler(unpickle.Bounded(io.BytesIO(_pickled(value))), table)
        reader.load()
        assert 0 < reader.made / 100 * count < table.most


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    if isinstance(value, Metadata):
        pickle.dump(value, stream)
        return stream.getvalue()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as file:
        return file.read("archive/data.pkl")


def _index(tensors: int, parts: int) -> Metadata:
    properties = TensorProperties(dtype=torch.bfloat16)
    index = Metadata({}, storage_data={})
    for n in range(tensors):
        name = f"decoder.layers.{n}.mlp.linear_fc1.weight"
        chunks = [ChunkStorageMetadata(torch.Size([64 * i, 0]), torch.Size([64, 4096])) for i in range(parts)]
        size = torch.Size([64 * parts, 4096])
        index.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)
        for i, chunk in enumerate(chunks):
            index.storage_data[MetadataIndex(name, chunk.offsets, i)] = _StorageInfo(f"__{i}_0.distcp", 1000 * n, 4096)
    return index
