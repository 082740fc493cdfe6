"""What tests of outputs in an S3 bucket share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.remote.objects import Bucket
from tests.core.remote.s3_client import S3Client

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
OUT = "s3://bucket/out/tiny"


def convert(**arguments: Any) -> Any:
    """Unverified, unless it is asked for: running the model takes longer than all else."""
    arguments = {"quant": "int8_wo", "verify": False} | arguments
    return bridge.convert(TINY, "hf", out=OUT, **arguments)


def there(s3: S3Client) -> set[str]:
    return {path.removeprefix("bucket/out/tiny/") for path in s3.tags("bucket/out/tiny/")}


class Broken(OSError):
    """What a folder raises for the error of a library."""


def breaking(monkeypatch: pytest.MonkeyPatch, at: str) -> list[str]:
    """Let sending `at` fail, once; returns what is sent before and afterwards."""
    real, sent, failed = Bucket.put, [], []

    def put(self: Bucket, name: str, content: bytes | Path) -> None:
        if isinstance(content, Path):
            sent.append(name)
            if name == at and not failed:
                failed.append(name)
                raise Broken("the line is dead")
        real(self, name, content)

    monkeypatch.setattr(Bucket, "put", put)
    return sent
