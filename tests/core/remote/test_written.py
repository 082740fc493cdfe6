"""What was written and lies at an address is compared where it lies: by `verify`, and with a golden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.errors import SourceError
from bridge.core.remote.opening import open_remote
from bridge.sources.live_models.loading import gathered_tokenizer
from bridge.sources.opening import open_source
from tests.core.remote.s3_client import S3Client
from tests.core.remote.server import serving
from tests.models.golden_made import calibration

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "out"
    bridge.convert(TINY, "trtllm", "int8_wo", out, verify=False, tp=2)
    return out


def damaged(written: Path, tmp_path: Path) -> Path:
    """A copy with a bit of its last tensor changed."""
    (tmp_path / "w").mkdir()
    for path in written.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "rank1.safetensors":
            data[-2] ^= 0x40
        (tmp_path / "w" / path.name).write_bytes(data)
    return tmp_path / "w"


@pytest.mark.slow
def test_weights_are_compared_and_outputs_are_said_not_to_be(written: Path) -> None:
    with serving(written) as (url, _):
        report = bridge.verify(url, TINY)
    assert report.parity and report.parity.passed and report.parity.tensors and report.out == url
    assert report.parity.not_run[0].startswith("outputs were not compared: the model is remote")


@pytest.mark.slow
def test_a_damaged_weight_is_found(written: Path, tmp_path: Path) -> None:
    with serving(damaged(written, tmp_path)) as (url, _):
        report = bridge.verify(url, TINY)
    assert report.parity and not report.parity.passed


@pytest.mark.slow
def test_a_golden_is_checked_and_recorded_there(written: Path, tmp_path: Path) -> None:
    with serving(written) as (url, _):
        bridge.golden.record(url, tmp_path / "golden", run=False)
    assert bridge.golden.check(tmp_path / "golden", written).passed
    with serving(damaged(written, tmp_path)) as (url, _):
        assert not bridge.golden.check(tmp_path / "golden", url).passed


@pytest.mark.slow
def test_a_golden_is_compared_with_what_lies_there(written: Path, tmp_path: Path) -> None:
    bridge.golden.record(written, tmp_path / "golden", run=False)
    with serving(damaged(written, tmp_path)) as (url, _):
        moved = bridge.golden.diff(tmp_path / "golden", url)
        far = CliRunner().invoke(app, ["golden", "diff", url, url])
    assert not moved.passed and moved.after == url and far.exit_code == 0


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = replace(calibration(), held_out=None)
    out = tmp_path_factory.mktemp("calibrated") / "out"
    bridge.convert(TINY, "hf", "fp8", out, calib=made, verify=False)
    return out


@pytest.mark.slow
def test_a_calibration_lies_where_its_output_does(calibrated: Path, s3: S3Client, tmp_path: Path) -> None:
    near = bridge.golden.record(calibrated, tmp_path / "near", run=False)
    s3.put(calibrated, "bucket/m")
    with serving(calibrated) as (url, _):
        for number, place in enumerate((url, "s3://bucket/m")):
            far = bridge.golden.record(place, tmp_path / f"{number}", run=False)
            assert near.rerun.calibrated and far.rerun == near.rerun and far.extra_files == near.extra_files
            report = bridge.verify(place, TINY)
            assert report.passed and report.made_from == bridge.verify(calibrated, TINY).made_from


def test_weights_that_may_not_be_read_are_told_before_a_calibration(calibrated: Path) -> None:
    refused = dict.fromkeys(("model.safetensors", "bridge/calibration.safetensors"), 403)
    with serving(calibrated, status=refused) as (url, _), pytest.raises(SourceError) as caught:
        bridge.verify(url, TINY)
    assert f"{url}/model.safetensors: access refused (403" in str(caught.value)


@pytest.mark.slow
def test_the_command_takes_addresses(written: Path, tmp_path: Path) -> None:
    with serving(written) as (url, _), serving(TINY) as (model, _):
        assert CliRunner().invoke(app, ["verify", url, "--against", model, "--quiet"]).exit_code == 0
        out = str(tmp_path / "out")
        made = CliRunner().invoke(
            app, ["convert", model, "--target", "hf", "--quant", "int8_wo", "--out", out, "--quiet"]
        )
        assert made.exit_code == 0 and (tmp_path / "out/bridge.json").exists()
        assert CliRunner().invoke(app, ["plan", model, "--target", "hf", "--quant", "int8_wo"]).exit_code == 0


def test_nothing_written_is_told(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _), pytest.raises(SourceError, match="none of the files of a model is there"):
        bridge.verify(url, TINY)


@pytest.mark.slow
def test_what_lies_there_is_shown_as_what_lies_here(written: Path) -> None:
    with serving(written) as (url, _):
        far = CliRunner().invoke(app, ["show", url.replace("http://", "HTTP://me:secret@"), "--json"])
        near = CliRunner().invoke(app, ["show", str(written), "--json"])
    assert far.exit_code == 0 and far.output == near.output


def test_show_tells_no_password(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _):
        said = CliRunner().invoke(app, ["show", f"{url.replace('//', '//me:secret@')}/a?sig=veiled"])
    assert said.exit_code == 1 and "none of the files of a model is there" in said.output
    assert "secret" not in said.output and "veiled" not in said.output


def test_a_manifest_cannot_name_files_elsewhere(written: Path, tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "escaped.txt").write_text("taken")
    manifest = (written / "bridge.json").read_text().replace("rank1.safetensors", "../../escaped.txt")
    (tmp_path / "a/b/bridge.json").write_text(manifest)
    with serving(tmp_path) as (url, manners):
        found = {name for name, _ in open_remote(f"{url}/a/b").files()}  # type: ignore[attr-defined]
    assert found == {"bridge.json"} and "escaped.txt" not in manners.sent


def test_side_files_are_written_inside_the_output_or_not_at_all(tmp_path: Path) -> None:
    """Of any source: one from an entry point has not passed through a listing."""
    source = open_source(TINY)
    source.side_files["../escaped.txt"] = b"taken"  # type: ignore[index]
    with pytest.raises(SourceError, match=r"files are named '\.\./escaped\.txt'"):
        bridge.convert(source, "hf", "int8_wo", tmp_path / "in/out", verify=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_tokenizer_is_gathered_inside_its_own_directory() -> None:
    with pytest.raises(SourceError, match=r"files are named '\.\./x'"):
        gathered_tokenizer({"config.json": b"{}", "../x": b""}, "s3://bucket/m")


def test_a_model_without_tokenizer_says_so_of_its_address() -> None:
    with pytest.raises(SourceError) as caught:
        gathered_tokenizer({"config.json": (TINY / "config.json").read_bytes(), "README.md": b""}, "s3://bucket/m")
    assert "s3://bucket/m: no tokenizer" in str(caught.value) and "/qbridge-" not in str(caught.value)


@pytest.mark.parametrize("key", ["m/../../escaped.txt", "m/a//b.txt", "m/./x.txt"])
def test_a_key_of_an_object_store_does_not_lead_out_of_the_output(key: str, s3: S3Client, tmp_path: Path) -> None:
    s3.put(TINY, "bucket/m")
    s3.write(f"bucket/{key}", b"taken")
    with pytest.raises(SourceError, match="s3://bucket/m: files are named"):
        bridge.convert("s3://bucket/m", "hf", "int8_wo", tmp_path / "in/out")
    assert not list(tmp_path.iterdir())


def test_what_stands_for_a_folder_in_a_store_is_no_file(s3: S3Client) -> None:
    """As the consoles of clouds make it: an empty object whose key ends in a slash."""
    s3.put(TINY, "bucket/m")
    for key in ("m/", "m/sub/"):
        s3.write(f"bucket/{key}", b"")
    assert open_source("s3://bucket/m").specs == open_source(TINY).specs
