"""Rows whose outputs go to a bucket: the bytes of a local row, finished ones left alone, cut-off ones gone on with."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import BatchError, SourceError, WriteError
from bridge.core.output.names import CALIBRATION
from bridge.core.remote import upload as outgoing
from bridge.core.remote.client import Client
from bridge.core.remote.objects import Bucket
from bridge.core.remote.staged import staging_path
from bridge.core.remote.upload_directory import owning
from bridge.core.remote.upload_note import NOTE
from bridge.sources.opening import open_source
from bridge.workflows.batch.prepare import outputs
from bridge.workflows.batch.prepare import plan as planning
from bridge.workflows.batch.values import DONE, PLANNED
from tests.core.remote.conftest import s3, s3_server
from tests.core.remote.s3_client import S3Client
from tests.core.remote.server import serving
from tests.faults.struck import contents, differing, timeless

__all__ = ["s3", "s3_server"]
TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
OUT = "s3://bucket/nightly"
CALIBRATED = '[[row]]\nname = "fp8"\nquant = "fp8"\nsamples = 2\nsequence = 32\n'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def manifest(rows: str = "", out: str = f"{OUT}/{{name}}") -> str:
    text = f"""
    [defaults]
    model = "{TINY}"
    target = "hf"
    out = "{out}"
    verify = false
    {rows}
    [[row]]
    name = "eight"
    quant = "int8_wo"
    """
    Path("nightly.toml").write_text(text)
    return "nightly.toml"


def there(s3: S3Client, name: str) -> dict[str, bytes]:
    root = f"bucket/nightly/{name}/"
    return {path.removeprefix(root): s3.read(path) for path in s3.tags(root)}


@pytest.mark.slow
def test_a_row_is_sent_and_left_alone_when_it_is_there(s3: S3Client, tmp_path: Path) -> None:
    report = bridge.batch(manifest(), workers=1)
    assert report.passed and not report.outcomes["eight"].kept
    bridge.convert(TINY, "hf", "int8_wo", "near", verify=False)
    assert differing(timeless(there(s3, "eight")), contents(Path("near"))) == []
    assert not staging_path(f"{OUT}/eight").parent.exists()

    tags = s3.tags("bucket")
    again = bridge.batch("nightly.toml", workers=1)
    assert again.passed and again.outcomes["eight"].kept
    assert tags == s3.tags("bucket")


@pytest.mark.slow
def test_what_was_not_sent_whole_is_no_finished_row(s3: S3Client) -> None:
    bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False)
    assert bridge.batch(manifest(), dry_run=True).outcomes["eight"].kept
    s3.write(f"bucket/nightly/eight/{NOTE}", b'{"run": "other", "sender": "there", "sent": {}}')
    report = bridge.batch("nightly.toml", workers=1)
    assert "is being sent by there" in report.outcomes["eight"].error


@pytest.mark.slow
def test_an_output_of_another_row_is_refused_and_replaced_if_asked(s3: S3Client) -> None:
    bridge.batch(manifest(), workers=1)
    text = Path("nightly.toml").read_text().replace("int8_wo", "fp8_pc_pt")
    Path("nightly.toml").write_text(text)
    told = bridge.batch("nightly.toml", workers=1).outcomes["eight"].error
    assert "exists already; choose another directory, or set `overwrite = true` in the row or in [defaults]" in told
    Path("nightly.toml").write_text(text + "overwrite = true\n")
    assert bridge.batch("nightly.toml", workers=1).passed
    assert json.loads(s3.read("bucket/nightly/eight/bridge.json"))["plan"]["scheme"] == "fp8_pc_pt"


@pytest.mark.slow
def test_where_nothing_can_be_sent_only_that_row_fails(s3: S3Client) -> None:
    rows = '[[row]]\nname = "web"\nquant = "int8_wo"\nout = "https://me:secret@host/{name}"\n'
    report = bridge.batch(manifest(rows), workers=1)
    assert not report.outcomes["eight"].error and "a web server takes no files" in report.outcomes["web"].error
    assert "secret" not in Path("nightly.batch.json").read_text()


@pytest.mark.slow
def test_ray_refuses_in_words(s3: S3Client) -> None:
    pytest.importorskip("ray")
    report = bridge.batch(manifest(), engine="ray", dry_run=True)
    assert "a directory that all machines see" in report.outcomes["eight"].error


@pytest.mark.slow
def test_a_calibrated_row_is_found_finished_and_a_new_row_takes_its_calibration(s3: S3Client) -> None:
    assert bridge.batch(manifest(CALIBRATED), workers=1, only="fp8").passed
    manifest(CALIBRATED + CALIBRATED.replace('"fp8"', '"again"', 1))
    report = bridge.batch("nightly.toml", workers=1, only=("fp8", "again"))
    assert report.outcomes["fp8"].kept and report.outcomes["again"].status == DONE and not report.calibrations
    far = [there(s3, name)[CALIBRATION] for name in ("fp8", "again")]
    assert far[0] == far[1]
    Path("nightly.batch.json").unlink()  # the summary
    assert bridge.batch("nightly.toml", workers=1, only="fp8").outcomes["fp8"].kept


@pytest.mark.slow
def test_what_a_killed_row_left_here_goes_when_it_is_found_sent(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as once:
        once.setattr(outgoing.Outgoing, "tidy_up", lambda self: None)  # as after a kill
        bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False)
    left = staging_path(f"{OUT}/eight")
    assert (left / "bridge.json").is_file()
    assert bridge.batch(manifest(), dry_run=True).outcomes["eight"].kept and left.is_dir()
    with owning(left.parent, "elsewhere"):
        assert bridge.batch("nightly.toml", workers=1).outcomes["eight"].kept and left.is_dir()
    assert bridge.batch("nightly.toml", workers=1).outcomes["eight"].kept
    assert not left.parent.exists()


@pytest.mark.slow
def test_a_finished_output_is_sent_where_no_disk_is_left(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(outgoing.Outgoing, "_send", interrupted)
        bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False)
    (full := list(shutil.disk_usage(".")))[2] = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(*full))  # type: ignore[attr-defined]
    rows = '[[row]]\nname = "four"\nquant = "int4_wo"\n'
    ends = bridge.batch(manifest(rows), dry_run=True).outcomes
    assert ends["eight"].status == PLANNED and "needs" in ends["four"].error and "of disk" in ends["four"].error
    assert bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False).out == f"{OUT}/eight"
    with pytest.raises(WriteError, match=" free, the plan needs"):
        bridge.convert(TINY, "hf", "int4_wo", f"{OUT}/four", verify=False)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_strict_and_a_dry_run_see_what_lies_there(s3: S3Client, tmp_path: Path) -> None:
    bridge.convert(TINY, "hf", "fp8_pc_pt", f"{OUT}/eight", verify=False)
    s3.write(f"bucket/nightly/sent/{NOTE}", b'{"run": "other", "sender": "there", "sent": {}}')
    rows = '[[row]]\nname = "four"\nquant = "int4_wo"\n[[row]]\nname = "sent"\nquant = "int4_wo"\n'
    before = s3.tags("bucket")
    ends = bridge.batch(manifest(rows), dry_run=True).outcomes
    assert "exists already" in ends["eight"].error and "is being sent by there" in ends["sent"].error
    assert ends["four"].status == PLANNED
    with pytest.raises(BatchError, match=r"(?s)2 rows cannot run.*is being sent by there.*exists already"):
        bridge.batch("nightly.toml", strict=True)
    assert s3.tags("bucket") == before and [path.name for path in tmp_path.iterdir()] == ["nightly.toml"]


LATER = [
    pytest.param(damage, marks=pytest.mark.product) for damage in (b'{"parity": 3}', b'{"findings": 3}', b"{", b"\xff")
]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"[]", *LATER])
def test_a_damaged_report_is_not_a_finished_row(damage: bytes, s3: S3Client) -> None:
    bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False)
    assert bridge.batch(manifest(), dry_run=True).outcomes["eight"].kept
    s3.write("bucket/nightly/eight/report.json", damage)
    assert "exists already" in bridge.batch("nightly.toml", workers=1).outcomes["eight"].error


@pytest.mark.slow
def test_a_bug_that_looks_at_what_is_there_is_told(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/eight", verify=False)
    manifest()
    monkeypatch.setattr(outputs, "_same_calibration", lambda *_: None + 1)  # type: ignore[operator]
    assert bridge.batch("nightly.toml", workers=1).outcomes["eight"].kind == "Crash"


def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are opened, in their order."""
    found: list[str] = []

    def opening(model: str, *more: Any) -> Any:
        found.append(model)
        return open_source(model, *more)

    monkeypatch.setattr(planning, "open_source", opening)
    monkeypatch.setattr(Client, "_wait", lambda *_: 0.0)
    return found


def errors_of(*urls: str) -> list[str]:
    """What is said of rows with these models."""
    rows = [f'[[row]]\nname = "{n}"\nmodel = "{url}"\nquant = "int8_wo"\n' for n, url in enumerate(urls)]
    report = bridge.batch(manifest("".join(rows), out="{name}"), dry_run=True)
    assert report.outcomes["eight"].status == PLANNED
    return [report.outcomes[str(n)].error for n in range(len(urls))]


def test_a_server_that_is_dead_is_waited_for_once(tmp_path: Path, opened: list[str]) -> None:
    host = f"localhost:{unused_port()}"
    dead = f"http://{host}"
    with serving(tmp_path) as (alive, _):
        urls = (f"{dead}/a", f"{dead}/a", f"http://me:key@{host.upper()}/b", f"{alive}/a", f"{alive}/b", f"{alive}/a")
        errors = errors_of(*urls)
    assert "Connection refused" in errors[0] and errors[0] == errors[1]
    assert errors[2].startswith(f"http://{host.upper()}/b: its server does not answer, as for {dead}/a; check")
    assert f"{alive}/a: none of the files" in errors[3] and errors[3] == errors[5] and f"{alive}/b: none" in errors[4]
    assert opened == [f"{dead}/a", f"{alive}/a", f"{alive}/b", str(TINY)]


@pytest.mark.slow
def test_a_store_that_is_dead_is_waited_for_once_a_bucket(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port()}")
    errors = errors_of("s3://one/a", "s3a://one/b", "s3://two/a")
    assert opened == ["s3://one/a", "s3://two/a", str(TINY)]
    assert errors[0].startswith("s3://one/a: cannot be listed") and errors[2].startswith("s3://two/a: cannot be listed")
    assert errors[1].startswith("s3a://one/b: its server does not answer, as for s3://one/a; check")


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
def test_a_store_of_outputs_that_is_dead_is_waited_for_once(
    resume: bool, s3: S3Client, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port()}")
    asked: list[str] = []
    real = Bucket.list

    def counted(bucket: Bucket) -> Any:
        asked.append(f"{bucket._bucket}/{bucket._root}")
        return real(bucket)

    monkeypatch.setattr(Bucket, "list", counted)
    outs = ("s3://one/a", "s3a://one/b", "s3://two/a")
    rows = "".join(f'[[row]]\nname = "{n}"\nout = "{url}"\n' for n, url in enumerate(outs))
    ends = bridge.batch(manifest(rows, out="{name}"), dry_run=True, resume=resume).outcomes
    assert asked == ["one/a", "two/a"] and ends["eight"].status == PLANNED
    assert ends["0"].error.startswith("s3://one/a: cannot be listed")
    assert ends["1"].error.startswith("s3a://one/b: its server does not answer, as for s3://one/a; check")
    assert ends["2"].error.startswith("s3://two/a: cannot be listed")


def test_a_hub_that_is_dead_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{unused_port()}")
    errors = errors_of("hf://org/a", "hf://org/b")
    assert opened == ["hf://org/a", str(TINY)]
    assert errors[1].startswith("hf://org/b: its server does not answer, as for hf://org/a; check")


def test_an_error_that_an_answer_led_to_is_no_dead_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def failing(model: str, *_: Any) -> Any:
        asked.append(model)
        try:
            raise TimeoutError  # of a proxy that was tried first, say
        except TimeoutError:
            raise SourceError(f"{model}: access refused")  # noqa: B904 -- as others raise it

    monkeypatch.setattr(planning, "open_source", failing)
    urls = ["https://host/a", "https://host/b"]
    rows = [f'[[row]]\nname = "{url[-1]}"\nmodel = "{url}"\n' for url in urls]
    report = bridge.batch(manifest("".join(rows), out="{name}"), dry_run=True)
    assert asked == [*urls, str(TINY)] and report.outcomes["b"].error == f"{urls[1]}: access refused"


def no_answer(url: str) -> SourceError:
    """What a request that nobody answered in time comes to."""
    error = SourceError(f"{url}: cannot be read")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.slow
@pytest.mark.parametrize("late", ["a", pytest.param("b", marks=pytest.mark.product)])
def test_one_read_that_nobody_answered_is_no_dead_store(
    late: str, s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        bridge.convert(TINY, "hf", "int8_wo", f"{OUT}/{name}", verify=False)
    outcome = outputs._outcome

    def once(planned: Any, out: Path) -> Any:
        if planned.row.name == late:
            raise no_answer(planned.row.out)
        return outcome(planned, out)

    monkeypatch.setattr(outputs, "_outcome", once)
    rows = "".join(f'[[row]]\nname = "{name}"\nquant = "int8_wo"\n' for name in "abc")
    ends = bridge.batch(manifest(rows), dry_run=True).outcomes
    assert ends[late].error == f"{OUT}/{late}: cannot be read"
    assert [ends[name].kept for name in "abc"] == [name != late for name in "abc"]


def test_a_store_that_answered_for_one_model_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def failing(model: str, *more: Any) -> Any:
        asked.append(model)
        if model.endswith("/good"):
            return open_source(str(TINY), *more)
        raise no_answer(model) if "host" in model else SourceError(model)

    monkeypatch.setattr(planning, "open_source", failing)
    urls = ["https://host/good", "https://host/late", "https://host/more"]
    rows = [f'[[row]]\nname = "{url[13:]}"\nmodel = "{url}"\nquant = "int8_wo"\n' for url in urls]
    ends = bridge.batch(manifest("".join(rows), out="{name}"), dry_run=True).outcomes
    assert asked[:3] == urls and ends["more"].error == f"{urls[2]}: cannot be read"


def test_an_output_that_was_looked_at_shows_that_its_store_answers(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def looking(url: str, *_: Any) -> None:
        asked.append(url)
        if not url.endswith("/a"):
            raise no_answer(url)

    monkeypatch.setattr(outputs, "check_output", looking)
    rows = "".join(f'[[row]]\nname = "{name}"\nquant = "int8_wo"\n' for name in "abc")
    bridge.batch(manifest(rows), dry_run=True, resume=False)
    assert asked == [f"{OUT}/{name}" for name in ("a", "b", "c", "eight")]
