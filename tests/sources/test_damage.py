"""Random damage to weight files: each one reads, or is a SourceError; nothing else gets out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bridge.container import SafetensorsFile
from bridge.errors import SourceError
from bridge.sources.torch_zip import TorchFile

STATE = {"a": torch.randn(4, 3), "b": torch.randn(5).to(torch.bfloat16)}
FORMS: dict[str, tuple[type[TorchFile] | type[SafetensorsFile], Callable[[Path], object]]] = {
    "zip": (TorchFile, lambda path: torch.save(STATE, path)),
    "legacy": (TorchFile, lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False)),
    "safetensors": (SafetensorsFile, lambda path: save_file(STATE, path)),
}


def damage(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, kind = rng.randrange(len(found)), rng.random()
        if kind < 0.6:
            found[at] = rng.randrange(256)
        elif kind < 0.75:
            found[at : at + 4] = b"\xff\xff\xff\xff"
        elif kind < 0.85:
            del found[at : at + rng.randrange(1, 20)]
        else:
            found[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(found)


@pytest.mark.parametrize("form", FORMS)
def test_damaged_file_reads_or_is_refused(form: str, tmp_path: Path) -> None:
    opener, save = FORMS[form]
    path = tmp_path / "weights"
    save(path)
    data, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        path.write_bytes(damage(data, rng))
        try:
            file = opener(path)
            assert {name: file.read(name).shape for name in file.specs}
        except SourceError:
            refused += 1
    assert refused > 200
