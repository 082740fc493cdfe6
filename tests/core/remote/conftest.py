"""A real S3 server in this process, for sources and outputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.remote.s3_client import S3Client
from tests.core.remote.server import S3, serving_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with serving_s3() as address:
        yield address


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Client]:
    """A client of that server, with an empty bucket called `bucket`."""
    for name, value in {"AWS_ENDPOINT_URL": s3_server, **S3}.items():
        monkeypatch.setenv(name, value)
    client = S3Client()
    client.client.create_bucket(Bucket="bucket")
    yield client
    client.empty("bucket")
    client.client.delete_bucket(Bucket="bucket")
