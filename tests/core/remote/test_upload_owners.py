"""Two runs that send to one place in an S3 bucket: one has it, and files of both are never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import WriteError
from bridge.core.progress import no_progress
from bridge.core.remote import upload as outgoing
from bridge.core.remote.objects import Bucket
from bridge.core.remote.upload import sending
from bridge.core.remote.upload_note import NOTE
from tests.core.remote.s3_client import S3Client
from tests.core.remote.uploads import OUT, TINY, breaking, convert, there


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_an_upload_of_another_place_is_refused(s3: S3Client) -> None:
    s3.write(f"bucket/out/tiny/{NOTE}", json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode())
    with pytest.raises(WriteError, match="is being sent by elsewhere:/a, or that run was cut off"):
        convert()


@pytest.mark.slow
def test_two_runs_here_do_not_share_an_output(s3: S3Client, tmp_path: Path) -> None:
    with sending(OUT, False, no_progress) as first:
        for overwrite in (False, True):
            with pytest.raises(WriteError, match=f"{OUT} is being made and sent by another run"):
                convert(overwrite=overwrite)
        assert NOTE in there(s3)  # the refused one left it
        bridge.convert(TINY, "hf", "int8_wo", first.local)
    assert NOTE not in there(s3) and bridge.verify(OUT, TINY).passed and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_of_the_same_name_elsewhere_is_another(
    s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers have one host name, and one path, and nothing else in common."""
    with pytest.raises(KeyboardInterrupt), sending(OUT, False, no_progress):
        note = s3.read(f"bucket/out/tiny/{NOTE}")
        raise KeyboardInterrupt
    s3.write(f"bucket/out/tiny/{NOTE}", note)
    with pytest.raises(WriteError, match=r"is being sent by .*, or that run was cut off"):
        convert()
    assert s3.read(f"bucket/out/tiny/{NOTE}") == note and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_whose_place_was_taken_sends_nothing_more(s3: S3Client) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    with (
        pytest.raises(WriteError, match="elsewhere:/a took this run's place"),
        sending(OUT, False, no_progress) as mine,
    ):
        bridge.convert(TINY, "hf", "int8_wo", mine.local)
        s3.write(f"bucket/out/tiny/{NOTE}", other)
    assert there(s3) == {NOTE} and s3.read(f"bucket/out/tiny/{NOTE}") == other


@pytest.mark.slow
def test_what_another_changed_meanwhile_is_not_called_whole(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bucket.put

    def put(self: Bucket, name: str, content: bytes | Path) -> None:
        real(self, name, content)
        if name == "bridge.json":
            assert isinstance(content, Path)
            size = content.with_name("model.safetensors").stat().st_size
            s3.write("bucket/out/tiny/model.safetensors", bytes(size))

    with monkeypatch.context() as once:
        once.setattr(Bucket, "put", put)
        with pytest.raises(WriteError, match=r"model\.safetensors did not arrive whole"):
            convert(verify=False)
    assert not {"config.json", "bridge.json"} & there(s3)
    convert(verify=False)
    assert bridge.verify(OUT, TINY).passed


@pytest.mark.slow
def test_a_run_whose_place_is_taken_while_it_sends_stops_there(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    sent = breaking(monkeypatch, "no such file")
    with pytest.raises(WriteError, match="elsewhere:/a took"), sending(OUT, False, no_progress) as mine:
        bridge.convert(TINY, "hf", "int8_wo", mine.local, verify=False)
        check = mine._check_ours

        def taken() -> None:
            if sent:
                s3.write(f"bucket/out/tiny/{NOTE}", other)
            check()

        monkeypatch.setattr(mine, "_check_ours", taken)
    assert sent == ["model.safetensors"] and s3.read(f"bucket/out/tiny/{NOTE}") == other


@pytest.mark.slow
@pytest.mark.parametrize("at", ["_checksum", "_listing"])
def test_a_run_whose_place_is_taken_unseen_leaves_note_and_uploads_of_the_other(
    at: str, s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, key = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode(), "out/tiny/other"
    with pytest.raises(WriteError, match="elsewhere:/a took"), sending(OUT, False, no_progress) as mine:
        bridge.convert(TINY, "hf", "int8_wo", mine.local, verify=False)
        owner = mine if at == "_listing" else outgoing
        real = getattr(owner, at)

        def taken(*given: Any) -> Any:
            if at == "_checksum" or "bridge.json" in there(s3):  # all was sent
                s3.write(f"bucket/out/tiny/{NOTE}", other)
            return real(*given)

        monkeypatch.setattr(owner, at, taken)
        s3.client.create_multipart_upload(Bucket="bucket", Key=key)
    assert s3.read(f"bucket/out/tiny/{NOTE}") == other
    (upload,) = s3.uploads()
    s3.client.abort_multipart_upload(Bucket="bucket", Key=key, UploadId=upload["UploadId"])


@pytest.mark.slow
def test_what_failed_takes_back_no_note_of_another(s3: S3Client) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    with pytest.raises(KeyboardInterrupt), sending(OUT, False, no_progress):
        s3.write(f"bucket/out/tiny/{NOTE}", other)
        raise KeyboardInterrupt
    assert s3.read(f"bucket/out/tiny/{NOTE}") == other


@pytest.mark.slow
def test_a_killed_run_that_was_to_replace_gives_no_leave_to_replace(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert()
    monkeypatch.setattr(outgoing.Outgoing, "give_up", lambda _: None)  # as after a kill
    with pytest.raises(KeyboardInterrupt), sending(OUT, True, no_progress):
        raise KeyboardInterrupt
    assert NOTE in there(s3)
    with pytest.raises(WriteError, match="exists already"):
        convert()
    convert(quant="fp8_pc_pt", overwrite=True)
    assert bridge.verify(OUT, TINY).passed and NOTE not in there(s3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "note",
    [
        b"",
        pytest.param(b"[" * 100_000, marks=pytest.mark.product),
        b'{"run": 1, "sender": [], "sent": 3}',
        pytest.param(b'{"run": "", "sender": "a", "sent": {"a": 1}}', marks=pytest.mark.product),
        pytest.param(b"\xff", marks=pytest.mark.product),
    ],
)
def test_a_malformed_note_is_that_of_another_run(note: bytes, s3: S3Client) -> None:
    s3.write(f"bucket/out/tiny/{NOTE}", note)
    with pytest.raises(WriteError, match="is being sent by"):
        convert()
    assert convert(overwrite=True).passed
