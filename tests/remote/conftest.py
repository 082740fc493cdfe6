"""A real S3 server in this process, for sources and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
