"""Outputs in an S3 bucket: whole or not loadable, never over what is not ours, and not sent twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

import bridge
from bridge.api.conversion import RunOptions, run
from bridge.api.request import Request
from bridge.calibration.data import Sampling
from bridge.calibration.walk.workers.processes import Workers
from bridge.cli import terminal
from bridge.core.errors import UsageError, WriteError
from bridge.core.remote import upload as outgoing
from bridge.core.remote.objects import Bucket
from bridge.core.remote.upload_note import NOTE
from bridge.targets import manifest
from tests.core.remote.s3_client import S3Client
from tests.core.remote.uploads import OUT, TINY, breaking, convert, there


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_bytes_are_those_of_a_local_output_and_nothing_else_is_left(s3: S3Client, tmp_path: Path) -> None:
    report = convert()
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "near", verify=False)
    near = {path.relative_to(tmp_path / "near").as_posix() for path in (tmp_path / "near").rglob("*") if path.is_file()}
    assert there(s3) == near and report.out == OUT and report.passed
    for name in ("model.safetensors", "config.json", "hf_quant_config.json", "bridge.json", "tokenizer.json"):
        assert s3.read(f"bucket/out/tiny/{name}") == (tmp_path / "near" / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["near"]


@pytest.mark.slow
def test_an_interrupt_while_sending_tells_what_is_there(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bucket.put

    def put(self: Bucket, name: str, content: bytes | Path) -> None:
        if isinstance(content, Path):
            raise KeyboardInterrupt
        real(self, name, content)

    monkeypatch.setattr(Bucket, "put", put)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert()
    problem, code = terminal._stopped(caught.value)
    assert code == 130 and "files are at s3://bucket/out/tiny, and nothing takes them for a model" in problem
    assert "0 of " in problem and "nothing half-written" not in problem and NOTE in there(s3)


@pytest.mark.slow
def test_an_interrupt_before_anything_is_sent_tells_where_the_finished_output_is(
    s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Any, progress: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(outgoing.Outgoing, "send", send)
        convert()
    made = outgoing.staging_path(OUT)
    assert f"the finished one is kept in {made}. Run again" in terminal._stopped(caught.value)[0]
    assert (made / "model.safetensors").exists() and there(s3) == {NOTE}
    with monkeypatch.context() as patch:
        patch.setattr("bridge.targets.manifest.write", None)  # nothing is made again
        convert()
    assert "bridge.json" in there(s3) and not list(tmp_path.iterdir())


class Meetings:
    """One of two processes that convert together: what it says is kept, and it hears what is given."""

    size, rank = 2, 0

    def __init__(self, *heard: Any) -> None:
        self.first, self.said, self._heard = not heard, [], [*heard]

    def agree(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [self._heard.pop(0) if self._heard else value, value]


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["fp8", "int8_wo"])
def test_no_process_calibrates_for_a_finished_output_that_is_only_sent(
    quant: str, s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    sampling = Sampling(samples=2, sequence=32)
    request = Request(TINY, "hf", quant, OUT, sampling=sampling, verify=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(outgoing.Outgoing, "send", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(request, RunOptions())
    writer = Meetings()
    report = run(request, RunOptions(workers=cast("Workers", writer)))
    assert writer.said == [False, report.to_json()]
    monkeypatch.setattr("bridge.api.conversion.calibrate", None)  # the helper does not calibrate
    helper = Meetings(*writer.said)
    assert run(request, RunOptions(workers=cast("Workers", helper))).to_json() == report.to_json()
    assert len(helper.said) == 2 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_are_sent_first_and_what_makes_a_model_last(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = breaking(monkeypatch, "no such file")
    convert()
    assert sent[0] == "model.safetensors" and sent[-2:] == ["config.json", "bridge.json"]


@pytest.mark.slow
def test_an_existing_output_is_refused_before_work_and_replaced_if_asked(s3: S3Client) -> None:
    convert()
    s3.write("bucket/out/tiny/old.safetensors", b"of an earlier version")
    with pytest.raises(WriteError, match=f"{OUT} exists already; choose another directory, or pass overwrite=True"):
        convert(quant="no scheme at all")  # nothing else was looked at
    convert(quant="fp8_pc_pt", overwrite=True)
    assert "old.safetensors" not in there(s3) and NOTE not in there(s3)
    assert json.loads(s3.read("bucket/out/tiny/bridge.json"))["plan"]["scheme"] == "fp8_pc_pt"


def test_what_is_not_ours_is_never_replaced(s3: S3Client) -> None:
    s3.write("bucket/out/tiny/thesis.tex", b"work of years")
    with pytest.raises(WriteError, match="was not written by bridge"):
        convert(overwrite=True)
    assert there(s3) == {"thesis.tex"}


@pytest.mark.slow
def test_an_interrupted_upload_is_not_loadable_and_goes_on_where_it_was(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError, match="the line is dead") as caught:
        convert()
    assert "nothing takes them for a model" in str(caught.value) and "Run again to send the rest" in str(caught.value)
    assert "model.safetensors" in there(s3) and not {"config.json", "bridge.json"} & there(s3)
    before = len(sent)
    made: list[str] = []
    monkeypatch.setattr("bridge.targets.manifest.write", lambda *_: made.append("again"))
    report = convert()
    assert (
        sent[before:] == ["config.json", "bridge.json"] and not made
    )  # the finished output was kept, nothing is redone
    assert report.passed and {"config.json", "bridge.json"} <= there(s3) and NOTE not in there(s3)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_arrived_damaged_is_sent_again(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert()
    s3.write("bucket/out/tiny/model.safetensors", b"x" * len(s3.read("bucket/out/tiny/model.safetensors")))
    before = len(sent)
    convert()
    assert "model.safetensors" in sent[before:]


@pytest.mark.slow
def test_a_conversion_that_fails_leaves_nothing(s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr("bridge.targets.manifest.write", fails)
    with pytest.raises(WriteError, match="the disk is full"):
        convert()
    assert not there(s3) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_replacing_makes_the_old_unloadable_before_the_first_new_file(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert()
    breaking(monkeypatch, "model.safetensors")
    with pytest.raises(WriteError):
        convert(quant="fp8_pc_pt", overwrite=True)
    assert not {"config.json", "bridge.json"} & there(s3)


@pytest.mark.slow
def test_what_another_scheme_had_sent_never_lies_beside_new_weights_as_a_model(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        breaking(once, "bridge.json")
        with pytest.raises(WriteError):
            convert()
    assert {"config.json", "model.safetensors"} <= there(s3)
    sent = breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert(quant="fp8_pc_pt")
    assert "model.safetensors" in sent and not {"config.json", "bridge.json"} & there(s3)
    convert(quant="fp8_pc_pt")
    assert bridge.verify(OUT, TINY).passed and NOTE not in there(s3)


@pytest.mark.slow
def test_old_weights_in_one_file_never_lie_beside_what_makes_new_ones_a_model(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders take model.safetensors before the shards that an index names."""
    convert(verify=False)
    breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert(shard_size="100KB", overwrite=True, verify=False)
    assert "model.safetensors.index.json" in there(s3) and "model.safetensors" not in there(s3)


@pytest.mark.slow
def test_uploads_in_parts_that_a_kill_cut_off_are_ended_and_those_of_others_are_not(s3: S3Client) -> None:
    mine, other = "out/tiny/model.safetensors", "out/tiny-2/model.safetensors"
    for key in (mine, other):
        s3.client.create_multipart_upload(Bucket="bucket", Key=key)
    convert(verify=False)
    open_ones = s3.uploads()
    assert [upload["Key"] for upload in open_ones] == [other]
    s3.client.abort_multipart_upload(Bucket="bucket", Key=other, UploadId=open_ones[0]["UploadId"])


@pytest.mark.slow
def test_who_may_not_list_uploads_has_a_whole_output(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refusing(client: Any, operation: str, named: Any) -> Any:
        asked.append(operation)
        raise PermissionError("Access Denied")

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", refusing)
    convert(verify=False)
    monkeypatch.undo()
    assert "ListMultipartUploads" in asked and "bridge.json" in there(s3) and NOTE not in there(s3)


@pytest.mark.slow
def test_what_a_kill_left_here_after_all_was_sent_is_removed_by_the_next_run(
    s3: S3Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr(outgoing.Outgoing, "tidy_up", lambda self: (self.local / "bridge.json").unlink())
        convert(verify=False)
    assert list(tmp_path.iterdir())
    with pytest.raises(WriteError, match="exists already"):
        convert(verify=False)
    assert not list(tmp_path.iterdir()) and "bridge.json" in there(s3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"resume": False}, {"verify": True}])
def test_a_finished_output_is_made_anew_where_its_run_asked_for_less(
    more: dict[str, Any], s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert(verify="resume" in more)
    made: list[str] = []
    write = manifest.write
    monkeypatch.setattr(manifest, "write", lambda work: (made.append("again"), write(work))[1])
    assert convert(**{"verify": True} | more).parity is not None and made


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("https://host/a", "a web server takes no files"),
        ("s3://bucket", "give a directory in it: s3://bucket/name"),
        ("nope://a/b", "nothing here knows nope://"),
        ("s3://[x", "s3://[x: not an address (Invalid IPv6 URL)"),
        ("s3://", "s3://: not an address (nothing follows ://)"),
        ("S3://bucket/a/../b", "give a directory in it: s3://bucket/name"),
    ],
)
def test_what_cannot_be_written_to_is_refused_in_words(out: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        bridge.convert(TINY, "hf", "int8_wo", out)
    assert said in str(caught.value)


def test_a_bucket_that_is_not_there_is_told_before_work(s3: S3Client) -> None:
    with pytest.raises(WriteError, match=r"s3://no-such/a: no bucket is called no-such; make it, or check its name"):
        bridge.convert(TINY, "hf", "int8_wo", "s3://no-such/a")
    assert not list(Path.cwd().iterdir())


def test_other_stores_of_fsspec_are_written_too() -> None:
    import fsspec

    bridge.convert(TINY, "hf", "int8_wo", "memory://made/here")
    fs = fsspec.filesystem("memory")
    assert fs.exists("/made/here/bridge.json") and not fs.exists(f"/made/here/{NOTE}")
    fs.rm("/made", recursive=True)
