"""`.metadata` of distributed checkpoints, against torch's own classes and torch.distributed.checkpoint's reading."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.dtypes import DTYPES
from bridge.core.files.archive import open_folder
from bridge.sources.weights.dcp import Dcp
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, one_file
from tests.fuzz.opcodes import programs
from tests.fuzz.targets.pickles import agree_or_known
from tests.sources.weights.dcp_saves import save

FILE = ".metadata"
NAMES = (
    "torch.distributed.checkpoint.metadata TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.metadata BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.filesystem _StoragePrefix",
    "torch.distributed.checkpoint.planner SavePlan",
    "torch int64",
)


def state() -> dict[str, torch.Tensor]:
    return {
        "layers.0.w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
        "layers.1.w": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
        "norm": torch.arange(7),
        "scalar": torch.tensor(2.5),
    }


def make(root: Path) -> None:
    boxes = [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))]
    save(root, {**state(), "extra": {"words": 1}}, {"layers.0.w": boxes})


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    old = pickle.dumps(pickle.loads(data), 2)
    return st.one_of(
        programs(data, NAMES), programs(old, NAMES), programs(data, NAMES, most=1), damaged(data, most=2)
    ).map(one_file(FILE))


def read(root: Path) -> dict[str, np.ndarray]:
    found = Dcp(open_folder(root))
    whole = {name: np.empty(spec.size, DTYPES[spec.dtype].storage) for name, spec in found.specs.items()}
    return {
        name: found.read_flat(name, 0, out.size, out).reshape(found.specs[name].shape) for name, out in whole.items()
    }


class _Only(pickle.Unpickler):
    """torch's classes of an index, and nothing else: what was changed must not run here either."""

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith(
            ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        ) and (
            (module, name) not in (("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"))
            and not isinstance(getattr(torch, name, None) if module == "torch" else None, torch.dtype)
        ):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def agree(root: Path, found: dict[str, np.ndarray]) -> None:
    def loaded() -> dict[str, torch.Tensor]:
        index = _Only(io.BytesIO((root / FILE).read_bytes())).load()
        entries = index.state_dict_metadata
        wanted = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in found}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(str(root)), no_dist=True)  # type: ignore[attr-defined]
        return wanted

    agree_or_known(loaded, found, state())


TARGET = Target("metadata", make, cases, read, agree, FILE)
