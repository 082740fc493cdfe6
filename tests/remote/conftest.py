"""A real S3 server in this process, for sources and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from bridge.remote import blocks as blocks_module
from bridge.remote import opening
from bridge.remote import weights as weights_module
from bridge.remote.place import Tree
from bridge.remote.weights import WeightReader
from tests.remote.server import S3, serving_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with serving_s3() as address:
        yield address


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """fsspec's file system of that server, with an empty bucket called `bucket`."""
    import s3fs

    said = {"AWS_ENDPOINT_URL": s3_server, **S3}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem(use_listings_cache=False)
    fs.mkdir("bucket")
    yield fs
    fs.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def held_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of which less is held than they have, so that straight is a way at all."""
    monkeypatch.setattr(opening, "Tree", partial(Tree, memory=1))


@pytest.fixture
def straight(held_little: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Reading is straight however slow the machine; what was read so."""
    found: list[tuple[int, int]] = []
    fill = WeightReader._fill

    def noted(self: WeightReader, run: weights_module._Run, out: memoryview) -> None:
        found.append((run.flow.at, len(out)))
        fill(self, run, out)

    monkeypatch.setattr(WeightReader, "_fill", noted)
    monkeypatch.setattr(blocks_module, "SWIFT", 1.0)
    monkeypatch.setattr(blocks_module.Blocks, "known", True)
    monkeypatch.setattr(weights_module, "PAGE", 16)
    return found
