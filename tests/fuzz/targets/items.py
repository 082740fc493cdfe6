"""`.distcp` files: the items of distributed checkpoints under an index that stays as it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from hypothesis.strategies import SearchStrategy

from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, one_file
from tests.fuzz.targets import metadata
from tests.fuzz.targets.pickles import agree_or_known, loaded

FILE = "__0_0.distcp"


def cases(root: Path) -> SearchStrategy[Case]:
    return damaged((root / FILE).read_bytes(), most=6).map(one_file(FILE))


def agree(root: Path, found: dict[str, np.ndarray]) -> None:
    """Every item by itself, put where the index says; checksums are not read, as no reader of single rows could."""
    agree_or_known(lambda: _loaded(root), found, metadata.state())


def _loaded(root: Path) -> dict[str, torch.Tensor]:
    index = pickle.loads((root / metadata.FILE).read_bytes())  # the valid one
    data = (root / FILE).read_bytes()
    wanted = {name: torch.empty_like(tensor) for name, tensor in metadata.state().items()}
    for key, info in index.storage_data.items():
        if key.fqn in wanted:
            tensor = loaded(data[info.offset : info.offset + info.length], checked=False)
            box = tuple(slice(at, at + n) for at, n in zip(key.offset, tensor.shape, strict=True))
            wanted[key.fqn][box] = tensor
    return wanted


TARGET = Target("items", metadata.make, cases, metadata.read, agree, FILE)
