"""An interrupt while an output for a bucket is begun leaves nothing, or tells what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.remote import upload as outgoing
from bridge.core.remote.upload_directory import owning
from bridge.core.remote.upload_note import NOTE
from tests.core.remote.s3_client import S3Client

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
OUT = "s3://bucket/out/tiny"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("call", ["Path.open", "lock"])
def test_an_interrupt_while_the_hidden_directory_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def interrupt(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"bridge.core.remote.upload_directory.{call}", interrupt)
        with pytest.raises(KeyboardInterrupt), owning(tmp_path / ".out.sending", "s3://bucket/out"):
            pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_an_interrupt_while_the_note_is_written_tells_that_it_may_be_there(
    s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(outgoing.Outgoing, "_leave_note", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            bridge.convert(TINY, "hf", "int8_wo", OUT)
    assert f"a note, {NOTE}, may be at {OUT}" in caught.value.__notes__[0]
    assert [path.name.endswith(".sending") for path in tmp_path.iterdir()] == [True]
    bridge.convert(TINY, "hf", "int8_wo", OUT)
    assert not [*tmp_path.iterdir()]
