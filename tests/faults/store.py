"""A bucket of S3 in this process, where far commands send their outputs, and what lies in it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import boto3

from tests.core.remote.server import S3, serving_s3

BUCKET = "faults"  # servers of one process share what they hold: tests of other stores have one called `bucket`


class Store:
    """A server, until it is closed. Parts of an upload may be small; the last may be smaller."""

    def __init__(self) -> None:
        import moto.s3.models

        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1
        self._open = contextlib.ExitStack()
        address = self._open.enter_context(serving_s3())
        self.environment = {"AWS_ENDPOINT_URL": address, **S3}
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=address,
            region_name=S3["AWS_DEFAULT_REGION"],
            aws_access_key_id=S3["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=S3["AWS_SECRET_ACCESS_KEY"],
        )
        self._client.create_bucket(Bucket=BUCKET)

    def address(self, name: str) -> str:
        """Of an output."""
        return f"s3://{BUCKET}/{name}"

    def put(self, folder: Path, name: str) -> None:
        """Let what lies in a folder be an output."""
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{name}/{path.relative_to(folder).as_posix()}"
                self._client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())

    def files(self, name: str) -> dict[str, bytes]:
        """What lies there of an output."""
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/").get("Contents", [])
        keys = [one["Key"] for one in found]
        return {
            key.removeprefix(f"{name}/"): self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys
        }

    def uploads(self, name: str) -> list[str]:
        """Uploads in parts that nobody has ended."""
        found = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{name}/").get("Uploads", [])
        return [one["Key"] for one in found]

    def close(self) -> None:
        self._open.close()
