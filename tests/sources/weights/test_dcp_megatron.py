"""What Megatron-Core's own dist_checkpointing writes: stacked layers, tensor parallel shards, experts, extra state."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from bridge.core.files.archive import open_folder
from bridge.sources.weights.dcp import Dcp
from bridge.sources.weights.distributed import common_state, distributed, json_object
from tests.sources.weights.dcp_saves import on_ranks, same

if importlib.util.find_spec("megatron.core") is None:  # importing it takes seconds: the ranks do that
    pytest.skip("megatron.core is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

WHOLE = """
def whole():
    torch.manual_seed(1)
    return {
        "decoder.layers.self_attention.linear_qkv.weight": torch.randn(3, 8, 6),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(3, 20, 6).to(torch.bfloat16),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(3, 6, 10),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.randn(3, 4, 7, 6),
        "decoder.final_layernorm.weight": torch.randn(6),
        "embedding.word_embeddings.weight": torch.randn(14, 6),
    }
"""
SAVE = (
    WHOLE
    + """
import argparse
from pathlib import Path
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *args: None
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

def shares():
    full, found = whole(), []
    def share(name, local, *offsets, **options):
        found.append(ShardedTensor.from_rank_offsets(name, local.contiguous(), *offsets, **options))
    qkv, fc1, fc2, experts, norm, words = full
    for l in range(3):
        local = full[qkv][l].chunk(2)[rank]
        share(qkv, local, (0, l, 3), (1, rank, 2), prepend_axis_num=1)
        for half, part in enumerate(full[fc1][l].chunk(2)):
            share(fc1, part.chunk(2)[rank], (0, l, 3), (1, 2 * half + rank, 4), prepend_axis_num=1)
        share(fc2, full[fc2][l].chunk(2, 1)[rank], (0, l, 3), (2, rank, 2), prepend_axis_num=1)
        for e in (2 * rank, 2 * rank + 1):
            share(experts, full[experts][l, e], (0, l, 3), (1, e, 4), prepend_axis_num=2)
    share(norm, full[norm], replica_id=rank)
    share(words, full[words].chunk(2)[rank], (0, rank, 2))
    share("optimizer.state.exp_avg." + words, full[words].chunk(2)[rank], (0, rank, 2))
    return {str(n): one for n, one in enumerate(found)}

if __name__ == "__main__":
    state = shares()
    for l in range(3):
        key = "decoder.layers.self_attention.linear_qkv._extra_state"
        state[f"extra{l}"] = ShardedObject(key, None, (3,), (l,), replica_id=rank)
    state["args"] = argparse.Namespace(num_layers=3, params_dtype=torch.bfloat16)
    state["iteration"] = 7
    path = Path(arguments[0]) / "megatron"
    path.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(path))
"""
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    on_ranks(SAVE, 2, path)
    return path / "megatron"


def test_shards_of_all_ranks_are_the_whole_tensors(saved: Path) -> None:
    found: dict[str, object] = {"torch": torch}
    exec(WHOLE, found)
    container = distributed(open_folder(saved))
    assert isinstance(container, Dcp) and len(container.files) >= 2
    same(container, found["whole"]())  # type: ignore[operator]
    assert container.skipped == {"optimizer": 14 * 6 * 4}


def test_extra_state_is_listed_and_readable(saved: Path) -> None:
    container = distributed(open_folder(saved))
    assert isinstance(container, Dcp)
    assert [name[-10:] for name in container.objects] == ["/shard_0_3", "/shard_1_3", "/shard_2_3"]
    assert all(container.open_object(name).value == [None] for name in container.objects)


def test_common_state_and_metadata_are_data(saved: Path) -> None:
    folder = open_folder(saved)
    metadata = json_object(folder, "metadata.json")
    assert metadata and metadata["sharded_backend"] == "torch_dist"
    common = common_state(folder)
    assert common is not None and common.value["iteration"] == 7
    assert common.value["args"].kind == "argparse.Namespace"
    assert common.value["args"]["num_layers"] == 3
