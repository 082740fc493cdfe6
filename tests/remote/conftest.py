"""A real S3 server in this process, for sources and outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """fsspec's file system of that server, with an empty bucket called `bucket`."""
    import s3fs

    said = {
        "AWS_ENDPOINT_URL": s3_server, "AWS_ACCESS_KEY_ID": "akey", "AWS_SECRET_ACCESS_KEY": "asecret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem(use_listings_cache=False)
    fs.mkdir("bucket")
    yield fs
    fs.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()
