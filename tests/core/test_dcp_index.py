"""The index is torch's own: it loads as the objects that torch makes of the same tensors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bridge.core.formats.dcp_index import Slab, Tensor, index, slab_name, slab_of
from bridge.core.formats.torch_pickle import Chunk, Item
from bridge.sources.weights.dcp_metadata import read_index


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dcp.Metadata:
    """What torch itself says of two tensors and a number."""
    root = tmp_path_factory.mktemp("torch")
    state = {"a.weight": torch.zeros(3, 5, 7, dtype=torch.bfloat16), "b": torch.zeros(11), "number": 4}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root), no_dist=True)
    return dcp.FileSystemReader(root).read_metadata()


def test_it_loads_as_what_torch_says_of_the_same_tensors(theirs: dcp.Metadata) -> None:
    places = {key.fqn: info for key, info in theirs.storage_data.items()}
    at = {name: (info.relative_path, info.offset, info.length) for name, info in places.items()}
    tensors = {
        "a.weight": Tensor((3, 5, 7), "bfloat16", (Chunk((0, 0, 0), (3, 5, 7), Item(*at["a.weight"])),)),
        "b": Tensor((11,), "float32", (Chunk((0,), (11,), Item(*at["b"])),)),
    }
    ours = pickle.loads(index(tensors, {"number": Item(*at["number"])}))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert (ours.planner_data, ours.version) == (theirs.planner_data, theirs.version)
    assert vars(ours.storage_meta).keys() == vars(theirs.storage_meta).keys()


def test_our_own_reader_takes_it() -> None:
    chunks = tuple(Chunk((layer, 0), (1, 5), Item("__0_0.distcp", 64 * layer, 20)) for layer in range(3))
    found = read_index(index({"a": Tensor((3, 5), "float32", chunks)}, {"state/shard_0_1": Item("f", 0, 9)}))
    assert not found.problems
    assert found.specs["a"].shape == (3, 5)
    assert [(chunk.offsets, chunk.item.offset) for chunk in found.chunks["a"]] == [
        ((0, 0), 0),
        ((1, 0), 64),
        ((2, 0), 128),
    ]
    assert found.objects["state/shard_0_1"].length == 9


def test_a_layer_of_a_stack_is_named_and_found_again() -> None:
    name = slab_name("decoder.layers.{l}.mlp.linear_fc2.weight", 3, 32)
    assert name == "decoder.layers[32].3.mlp.linear_fc2.weight"
    slab = slab_of(name)
    assert slab == Slab("decoder.layers.mlp.linear_fc2.weight", 3, 32)
    assert slab.of((1, 7, 5)) == (32, 7, 5)
    assert slab_of("decoder.layers.3.mlp.linear_fc2.weight").of((7, 5)) == (7, 5)


@pytest.mark.slow
def test_an_index_of_many_chunks_stays_small(tmp_path: Path) -> None:
    """Words are said once: 0.15 kB a chunk, where torch's own pickle of the same takes as much."""
    tensors = {
        f"layers.{n}.weight": Tensor((300, 70_000), "bfloat16", (Chunk((0, 0), (300, 70_000), Item("f", n, 1)),))
        for n in range(5000)
    }
    assert len(index(tensors, {})) < 5000 * 400
