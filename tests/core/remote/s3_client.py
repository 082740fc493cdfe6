"""Reads and writes the test's S3 server by boto3: a client that is not ours, where `bridge` sends bytes by obstore."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class S3Client:
    """A bucket by paths, `bucket/key`; `client` is boto3's own."""

    def __init__(self) -> None:
        import boto3

        self.client = boto3.client("s3")

    def read(self, path: str) -> bytes:
        bucket, key = path.split("/", 1)
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def write(self, path: str, data: bytes) -> None:
        bucket, key = path.split("/", 1)
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def put(self, root: Path, to: str) -> str:
        """Every file under `root`, and the address of the model that they are."""
        for path in root.rglob("*"):
            if path.is_file():
                self.write(f"{to}/{path.relative_to(root).as_posix()}", path.read_bytes())
        return f"s3://{to}"

    def tags(self, path: str) -> dict[str, Any]:
        """The ETag of every object whose path begins with `path`."""
        bucket, _, prefix = path.partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {f"{bucket}/{found['Key']}": found["ETag"] for page in pages for found in page.get("Contents", ())}

    def uploads(self) -> list[dict[str, Any]]:
        """The uploads in parts to `bucket` that are open."""
        return self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])  # type: ignore[no-any-return]

    def empty(self, bucket: str) -> None:
        for path in self.tags(bucket):
            self.client.delete_object(Bucket=bucket, Key=path.split("/", 1)[1])
