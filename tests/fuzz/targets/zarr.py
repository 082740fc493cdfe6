"""Folders of zarr 2: `.zarray`, chunks and `metadata.json`, against NumPy's reading of each chunk."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.dtypes import DTYPES
from bridge.core.files.archive import open_folder
from bridge.sources.weights.distributed import distributed
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, damaged, jsons, one_file
from tests.sources.weights.test_zarr import array

FILE = "a.weight/.zarray"
DTYPE_WORDS = ("<f8", "<i4", "|u1", ">f4", "bfloat16", "<f2", "O", "V8", "<U3", "f4,f4", "<M8[s]", "(2,2)f4", "i1" * 50)


def make(root: Path) -> None:
    array(root, "a.weight", torch.arange(40, dtype=torch.float32).reshape(8, 5), (3, 2))
    array(root, "b", torch.arange(7, dtype=torch.bfloat16), (4,))
    (root / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')


def cases(root: Path) -> SearchStrategy[Case]:
    tree = json.loads((root / FILE).read_text())
    chunk = (root / "a.weight/0.0").read_bytes()
    return st.one_of(
        jsons(tree, (*VALUES, *DTYPE_WORDS)).map(one_file(FILE)),
        jsons(tree, (*VALUES, *DTYPE_WORDS)).map(one_file(FILE)),
        jsons(json.loads((root / "metadata.json").read_text()), (*VALUES, "torch_dist", "zarr")).map(
            one_file("metadata.json")
        ),
        damaged(chunk).map(one_file("a.weight/0.0")),
        st.sampled_from(("a.weight/2.1", "b/0", "a.weight/.zarray")).map(lambda name: {name: None}),
    )


def read(root: Path) -> dict[str, np.ndarray]:
    found = distributed(open_folder(root))
    if found is None:
        return {}
    whole = {name: np.empty(spec.size, DTYPES[spec.dtype].storage) for name, spec in found.specs.items()}
    return {
        name: found.read_flat(name, 0, out.size, out).reshape(found.specs[name].shape) for name, out in whole.items()
    }


def agree(root: Path, found: dict[str, np.ndarray]) -> None:
    for name, values in found.items():
        said = json.loads((root / name / ".zarray").read_bytes())
        shape, chunks = said["shape"], said["chunks"]
        assert list(values.shape) == shape
        kind = np.dtype(np.uint16 if said["dtype"] == "bfloat16" else said["dtype"])
        for index in itertools.product(*(range(-(-n // step)) for n, step in zip(shape, chunks, strict=True))):
            file = root / name / (str(said.get("dimension_separator", ".")).join(map(str, index)) or "0")
            chunk = np.frombuffer(file.read_bytes(), kind).reshape(chunks)
            box = tuple(
                slice(i * step, min((i + 1) * step, n)) for i, step, n in zip(index, chunks, shape, strict=True)
            )
            inside = chunk[tuple(slice(0, cut.stop - cut.start) for cut in box)]
            assert values[box].tobytes() == inside.tobytes()


TARGET = Target("zarr", make, cases, read, agree, FILE)
