"""Outputs in an S3 bucket: whole or not loadable, never over what is not ours, and not sent twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge import finish, terminal
from bridge.errors import UsageError, WriteError
from bridge.progress import quiet
from bridge.remote import outgoing
from bridge.remote.note import NOTE
from bridge.remote.outgoing import sending

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
OUT = "s3://bucket/out/tiny"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outgoing, "TRIES", 1)


def convert(**arguments: Any) -> Any:
    return bridge.convert(TINY, "hf", arguments.pop("quant", "int8_wo"), OUT, **arguments)


def there(s3: Any) -> set[str]:
    return {path.removeprefix("bucket/out/tiny/") for path in s3.find("bucket/out/tiny")}


class Broken(Exception):
    """What a store's library raises."""


def breaking(monkeypatch: pytest.MonkeyPatch, at: str) -> list[str]:
    """Let sending `at` fail, once; returns what is sent before and afterwards."""
    import s3fs

    real, sent, failed = s3fs.S3FileSystem.put_file, [], []

    def put_file(self: Any, here: str, to: str, **more: Any) -> Any:
        sent.append(to.removeprefix("bucket/out/tiny/"))
        if sent[-1] == at and not failed:
            failed.append(to)
            raise Broken("the line is dead")
        return real(self, here, to, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "put_file", put_file)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the methods that it was made with
    return sent


def test_the_bytes_are_those_of_a_local_output_and_nothing_else_is_left(s3: Any, tmp_path: Path) -> None:
    report = convert()
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "near")
    near = {path.relative_to(tmp_path / "near").as_posix() for path in (tmp_path / "near").rglob("*") if path.is_file()}
    assert there(s3) == near and report.out == OUT and report.passed
    for name in ("model.safetensors", "config.json", "hf_quant_config.json", "bridge.json", "tokenizer.json"):
        assert s3.cat_file(f"bucket/out/tiny/{name}") == (tmp_path / "near" / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["near"]


def test_an_interrupt_while_sending_tells_what_is_there(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    def put_file(self: Any, here: str, to: str, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(s3fs.S3FileSystem, "put_file", put_file)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(KeyboardInterrupt) as caught:
        convert()
    problem, code = terminal._stopped(caught.value)
    assert code == 130 and "files are at s3://bucket/out/tiny, and nothing takes them for a model" in problem
    assert "0 of " in problem and "nothing half-written" not in problem and NOTE in there(s3)


def test_an_interrupt_before_anything_is_sent_tells_where_the_finished_output_is(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Any, progress: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(outgoing.Outgoing, "send", send)
        convert()
    made = outgoing.made_at(OUT)
    assert f"the finished one is kept in {made}. Run again" in terminal._stopped(caught.value)[0]
    assert (made / "model.safetensors").exists() and there(s3) == {NOTE}
    with monkeypatch.context() as patch:
        patch.setattr("bridge.finish.write", None)  # nothing is made again
        convert()
    assert "bridge.json" in there(s3) and not list(tmp_path.iterdir())


def test_weights_are_sent_first_and_what_makes_a_model_last(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = breaking(monkeypatch, "no such file")
    convert()
    assert sent[0] == "model.safetensors" and sent[-2:] == ["config.json", "bridge.json"]


def test_an_existing_output_is_refused_before_work_and_replaced_if_asked(s3: Any) -> None:
    convert()
    s3.pipe_file("bucket/out/tiny/old.safetensors", b"of an earlier version")
    with pytest.raises(WriteError, match=f"{OUT} exists already; choose another directory, or pass overwrite=True"):
        convert(quant="no scheme at all")  # nothing else was looked at
    convert(quant="fp8_pc_pt", overwrite=True)
    assert "old.safetensors" not in there(s3) and NOTE not in there(s3)
    assert json.loads(s3.cat_file("bucket/out/tiny/bridge.json"))["plan"]["scheme"] == "fp8_pc_pt"


def test_what_is_not_ours_is_never_replaced(s3: Any) -> None:
    s3.pipe_file("bucket/out/tiny/thesis.tex", b"work of years")
    with pytest.raises(WriteError, match="was not written by bridge"):
        convert(overwrite=True)
    assert there(s3) == {"thesis.tex"}


def test_an_interrupted_upload_is_not_loadable_and_goes_on_where_it_was(
    s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError, match="the line is dead") as caught:
        convert()
    assert "nothing takes them for a model" in str(caught.value) and "Run again to send the rest" in str(caught.value)
    assert "model.safetensors" in there(s3) and not {"config.json", "bridge.json"} & there(s3)
    before = len(sent)
    made: list[str] = []
    monkeypatch.setattr("bridge.finish.write", lambda *_: made.append("again"))
    report = convert()
    assert (
        sent[before:] == ["config.json", "bridge.json"] and not made
    )  # the finished output was kept, nothing is redone
    assert report.passed and {"config.json", "bridge.json"} <= there(s3) and NOTE not in there(s3)
    assert not list(tmp_path.iterdir())


def test_what_arrived_damaged_is_sent_again(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert()
    s3.pipe_file("bucket/out/tiny/model.safetensors", b"x" * s3.info("bucket/out/tiny/model.safetensors")["size"])
    before = len(sent)
    convert()
    assert "model.safetensors" in sent[before:]


def test_an_upload_of_another_place_is_refused(s3: Any) -> None:
    s3.pipe_file(f"bucket/out/tiny/{NOTE}", json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode())
    with pytest.raises(WriteError, match="is being sent by elsewhere:/a, or that run was cut off"):
        convert()


def test_a_conversion_that_fails_leaves_nothing(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr("bridge.finish.write", fails)
    with pytest.raises(WriteError, match="the disk is full"):
        convert()
    assert not there(s3) and not list(tmp_path.iterdir())


def test_replacing_makes_the_old_unloadable_before_the_first_new_file(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    convert()
    breaking(monkeypatch, "model.safetensors")
    with pytest.raises(WriteError):
        convert(quant="fp8_pc_pt", overwrite=True)
    assert not {"config.json", "bridge.json"} & there(s3)


def test_what_another_scheme_had_sent_never_lies_beside_new_weights_as_a_model(
    s3: Any, monkeypatch: pytest.MonkeyPatch
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


def test_old_weights_in_one_file_never_lie_beside_what_makes_new_ones_a_model(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders take model.safetensors before the shards that an index names."""
    convert(verify=False)
    breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert(shard_size="100KB", overwrite=True, verify=False)
    assert "model.safetensors.index.json" in there(s3) and "model.safetensors" not in there(s3)


def test_uploads_in_parts_that_a_kill_cut_off_are_ended_and_those_of_others_are_not(s3: Any) -> None:
    mine, other = "out/tiny/model.safetensors", "out/tiny-2/model.safetensors"
    for key in (mine, other):
        s3.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    convert(verify=False)
    open_ones = s3.list_multipart_uploads("bucket")
    assert [upload["Key"] for upload in open_ones] == [other]
    s3.abort_mpu("bucket", other, open_ones[0]["UploadId"])


def test_who_may_not_list_uploads_has_a_whole_output(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    asked: list[str] = []

    def refusing(_: Any, method: str, **__: Any) -> Any:
        asked.append(method)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", refusing)
    s3fs.S3FileSystem.clear_instance_cache()
    convert(verify=False)
    assert "list_multipart_uploads" in asked and "bridge.json" in there(s3) and NOTE not in there(s3)


def test_what_a_kill_left_here_after_all_was_sent_is_removed_by_the_next_run(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr(outgoing.Outgoing, "tidy_up", lambda self: (self.local / "bridge.json").unlink())
        convert(verify=False)
    assert list(tmp_path.iterdir())
    with pytest.raises(WriteError, match="exists already"):
        convert(verify=False)
    assert not list(tmp_path.iterdir()) and "bridge.json" in there(s3)


def test_two_runs_here_do_not_share_an_output(s3: Any, tmp_path: Path) -> None:
    with sending(OUT, False, quiet) as first:
        for overwrite in (False, True):
            with pytest.raises(WriteError, match=f"{OUT} is being made and sent by another run"):
                convert(overwrite=overwrite)
        assert NOTE in there(s3)  # the refused one left it
        bridge.convert(TINY, "hf", "int8_wo", first.local)
    assert NOTE not in there(s3) and bridge.verify(OUT, TINY).passed and not list(tmp_path.iterdir())


def test_a_run_of_the_same_name_elsewhere_is_another(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers have one host name, and one path, and nothing else in common."""
    with pytest.raises(KeyboardInterrupt), sending(OUT, False, quiet):
        note = s3.cat_file(f"bucket/out/tiny/{NOTE}")
        raise KeyboardInterrupt
    s3.pipe_file(f"bucket/out/tiny/{NOTE}", note)
    with pytest.raises(WriteError, match=r"is being sent by .*, or that run was cut off"):
        convert()
    assert s3.cat_file(f"bucket/out/tiny/{NOTE}") == note and not list(tmp_path.iterdir())


def test_a_run_whose_place_was_taken_sends_nothing_more(s3: Any) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    with (
        pytest.raises(WriteError, match="elsewhere:/a took this run's place"),
        sending(OUT, False, quiet) as mine,
    ):
        bridge.convert(TINY, "hf", "int8_wo", mine.local)
        s3.pipe_file(f"bucket/out/tiny/{NOTE}", other)
    assert there(s3) == {NOTE} and s3.cat_file(f"bucket/out/tiny/{NOTE}") == other


def test_what_another_changed_meanwhile_is_not_called_whole(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    real = s3fs.S3FileSystem.put_file

    def put_file(self: Any, here: str, to: str, **more: Any) -> Any:
        real(self, here, to, **more)
        if to.endswith("bridge.json"):
            size = Path(here).with_name("model.safetensors").stat().st_size
            self.pipe_file("bucket/out/tiny/model.safetensors", bytes(size))

    with monkeypatch.context() as once:
        once.setattr(s3fs.S3FileSystem, "put_file", put_file)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(WriteError, match=r"model\.safetensors did not arrive whole"):
            convert(verify=False)
    assert not {"config.json", "bridge.json"} & there(s3)
    s3fs.S3FileSystem.clear_instance_cache()
    convert(verify=False)
    assert bridge.verify(OUT, TINY).passed


def test_a_run_whose_place_is_taken_while_it_sends_stops_there(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    sent = breaking(monkeypatch, "no such file")
    with pytest.raises(WriteError, match="elsewhere:/a took"), sending(OUT, False, quiet) as mine:
        bridge.convert(TINY, "hf", "int8_wo", mine.local, verify=False)
        check = mine._check_ours

        def taken() -> None:
            if sent:
                s3.pipe_file(f"bucket/out/tiny/{NOTE}", other)
            check()

        monkeypatch.setattr(mine, "_check_ours", taken)
    assert sent == ["model.safetensors"] and s3.cat_file(f"bucket/out/tiny/{NOTE}") == other


@pytest.mark.parametrize("at", ["_checksum", "_listing"])
def test_a_run_whose_place_is_taken_unseen_leaves_note_and_uploads_of_the_other(
    at: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, key = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode(), "out/tiny/other"
    with pytest.raises(WriteError, match="elsewhere:/a took"), sending(OUT, False, quiet) as mine:
        bridge.convert(TINY, "hf", "int8_wo", mine.local, verify=False)
        owner = mine if at == "_listing" else outgoing
        real = getattr(owner, at)

        def taken(*given: Any) -> Any:
            if at == "_checksum" or "bridge.json" in there(s3):  # all was sent
                s3.pipe_file(f"bucket/out/tiny/{NOTE}", other)
            return real(*given)

        monkeypatch.setattr(owner, at, taken)
        s3.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    assert s3.cat_file(f"bucket/out/tiny/{NOTE}") == other
    (upload,) = s3.list_multipart_uploads("bucket")
    s3.abort_mpu("bucket", key, upload["UploadId"])


def test_what_failed_takes_back_no_note_of_another(s3: Any) -> None:
    other = json.dumps({"run": "1", "sender": "elsewhere:/a", "sent": {}}).encode()
    with pytest.raises(KeyboardInterrupt), sending(OUT, False, quiet):
        s3.pipe_file(f"bucket/out/tiny/{NOTE}", other)
        raise KeyboardInterrupt
    assert s3.cat_file(f"bucket/out/tiny/{NOTE}") == other


def test_a_killed_run_that_was_to_replace_gives_no_leave_to_replace(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    convert()
    monkeypatch.setattr(outgoing.Outgoing, "give_up", lambda _: None)  # as after a kill
    with pytest.raises(KeyboardInterrupt), sending(OUT, True, quiet):
        raise KeyboardInterrupt
    assert NOTE in there(s3)
    with pytest.raises(WriteError, match="exists already"):
        convert()
    convert(quant="fp8_pc_pt", overwrite=True)
    assert bridge.verify(OUT, TINY).passed and NOTE not in there(s3)


@pytest.mark.parametrize("more", [{"resume": False}, {"verify": True}])
def test_a_finished_output_is_made_anew_where_its_run_asked_for_less(
    more: dict[str, Any], s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, "config.json")
    with pytest.raises(WriteError):
        convert(verify="resume" in more)
    made: list[str] = []
    write = finish.write
    monkeypatch.setattr(finish, "write", lambda work: (made.append("again"), write(work))[1])
    assert convert(**more).parity is not None and made


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[" * 100_000,
        b'{"run": 1, "sender": [], "sent": 3}',
        b'{"run": "", "sender": "a", "sent": {"a": 1}}',
        b"\xff",
    ],
)
def test_a_malformed_note_is_that_of_another_run(note: bytes, s3: Any) -> None:
    s3.pipe_file(f"bucket/out/tiny/{NOTE}", note)
    with pytest.raises(WriteError, match="is being sent by"):
        convert()
    assert convert(overwrite=True).passed


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("https://host/a", "a web server takes no files"),
        ("hf://org/name", "`hf upload org/name DIRECTORY`"),
        ("s3://bucket", "give a directory in it: s3://bucket/name"),
        ("nope://a/b", "nothing here knows nope://"),
        ("s3://[x", "s3://[x: no address (Invalid IPv6 URL)"),
        ("s3://", "s3://: no address (nothing follows ://)"),
        ("S3://bucket/a/../b", "give a directory in it: s3://bucket/name"),
    ],
)
def test_what_cannot_be_written_to_is_refused_in_words(out: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        bridge.convert(TINY, "hf", "int8_wo", out)
    assert said in str(caught.value)


def test_a_bucket_that_is_not_there_is_told_before_work(s3: Any) -> None:
    with pytest.raises(WriteError, match=r"s3://no-such/a: no bucket is called no-such; make it, or check its name"):
        bridge.convert(TINY, "hf", "int8_wo", "s3://no-such/a")
    assert not list(Path.cwd().iterdir())


def test_other_stores_of_fsspec_are_written_too() -> None:
    import fsspec

    bridge.convert(TINY, "hf", "int8_wo", "memory://made/here")
    fs = fsspec.filesystem("memory")
    assert fs.exists("/made/here/bridge.json") and not fs.exists(f"/made/here/{NOTE}")
    fs.rm("/made", recursive=True)
