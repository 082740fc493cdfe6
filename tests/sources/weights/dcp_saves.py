"""Distributed checkpoints written by torch itself, cut as a test wants them without starting processes."""

from __future__ import annotations

import dataclasses
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bridge.core.dtypes import DTYPES
from bridge.sources.weights.containers import Container
from tests.oracles.server import processes

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Cutting(dcp.DefaultSavePlanner):
    """Writes every tensor in the boxes it is told, as ranks that hold them would."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self.boxes]
        for name, boxes in self.boxes.items():
            tensor = self.state_dict[name]
            for number, (offsets, sizes) in enumerate(boxes):
                at = torch.Size(offsets)
                data = TensorWriteData(
                    ChunkStorageMetadata(at, torch.Size(sizes)),
                    TensorProperties.create_from_tensor(tensor),
                    tensor.size(),
                )
                items.append(WriteItem(MetadataIndex(name, at, number), WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, item: WriteItem) -> Any:
        if item.index.fqn not in self.boxes:
            return super().resolve_data(item)
        chunk = item.tensor_data.chunk
        cut = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[item.index.fqn][cut].clone()


def save(path: Path, state: Mapping[str, Any], boxes: Mapping[str, Sequence[Box]] | None = None, **writer: Any) -> Path:
    """Save as torch does; `boxes` says how single tensors are cut, `writer` goes to the FileSystemWriter."""
    storage = dcp.FileSystemWriter(str(path), **writer)
    dcp.save(dict(state), storage_writer=storage, planner=Cutting(boxes or {}), no_dist=True)
    return path


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """Write the index again after `change`, as torch would have pickled it."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a container gives it."""
    plain = tensor.detach().contiguous()
    return plain.view(getattr(torch, DTYPES[str(plain.dtype).removeprefix("torch.")].storage)).numpy()


def read(container: Container, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Read elements (all by default) into an array that was full of something else."""
    spec = container.specs[name]
    end = spec.size if end is None else end
    out = np.frombuffer(b"\xa5" * ((end - begin) * DTYPES[spec.dtype].bits // 8), DTYPES[spec.dtype].storage)
    return container.read_flat(name, begin, end, out.copy())


def same(container: Container, state: Mapping[str, torch.Tensor]) -> None:
    """Hold every tensor of a container against torch's, bit for bit."""
    assert set(container.specs) == set(state)
    for name, tensor in state.items():
        spec = container.specs[name]
        assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert read(container, name).tobytes() == bits(tensor).tobytes(), name


def on_ranks(code: str, count: int, *arguments: object) -> None:
    """Run a program in `count` processes of one gloo group; `rank`, `count` and `arguments` are there."""
    head = (
        "import sys, torch, torch.distributed as dist\n"
        "rank, count, arguments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group('gloo', init_method='file://' + sys.argv[3], rank=rank, world_size=count)\n"
    )
    end = "\nif __name__ == '__main__':\n    dist.destroy_process_group()\n"
    meeting = Path(str(arguments[0])) / "meeting"
    program = Path(str(arguments[0])) / "program.py"
    program.write_text(head + code + end)
    given = [[str(rank), str(count), str(meeting), *map(str, arguments)] for rank in range(count)]
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, processes())) for _ in given]
        for done in [pool.submit(_run, program, words) for pool, words in zip(pools, given, strict=True)]:
            done.result(timeout=300)


def _run(program: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = [str(program), *words]
    runpy.run_path(str(program), run_name="__main__")
