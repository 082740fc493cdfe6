"""Random damage to weight files: each one reads, or is a SourceError; nothing else gets out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bridge.core.errors import BridgeError, SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.torch_file import TorchFile
from bridge.sources.opening import open_source
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, meta, spelled
from tests.sources.weights.test_zarr import array

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


@pytest.mark.slow
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


def megatron(root: Path) -> Path:
    torch.manual_seed(0)
    return megatron_bridge(root, spelled(llama(), "megatron")) / "iter_0000100"


def share_of_meta(root: Path) -> Path:
    return meta(root, spelled({name: tensor[:96] for name, tensor in llama().items()}, "meta"), 2, vocab_size=96)


def zarr(root: Path) -> Path:
    for name, tensor in spelled(llama(), "megatron").items():
        array(root, name, tensor, tuple(tensor.shape))
    (root / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    torch.save({"iteration": 100}, root / "common.pt")
    return root


CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "index": (megatron, ".metadata"),
    "items": (megatron, "__0_0.distcp"),
    "common state": (megatron, "common.pt"),
    "backend": (megatron, "metadata.json"),
    "configuration": (megatron, "run_config.yaml"),
    "rank": (share_of_meta, "consolidated.01.pth"),
    "params": (share_of_meta, "params.json"),
    "array": (zarr, "output_layer.weight/.zarray"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKPOINTS)
def test_damaged_checkpoint_reads_or_is_refused(what: str, tmp_path: Path) -> None:
    """Through the front door: no other exception, no hang, and what can still be read has the shapes that it says."""
    make, name = CHECKPOINTS[what]
    root = make(tmp_path / "c")
    data, rng = (root / name).read_bytes(), random.Random(what)
    for _ in range(20):
        (root / name).write_bytes(damage(data, rng))
        try:
            source = open_source(root, config=CONFIG if what == "array" else None)
            assert all(source.read(tensor).shape == spec.shape for tensor, spec in source.specs.items())
        except BridgeError as error:
            assert str(root) in str(error) or str(root.parent) in str(error)
