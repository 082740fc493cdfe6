"""Models in an S3 bucket, on a real server: every kind of checkpoint, read in place, and what a store refuses."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import SourceError, UsageError
from bridge.core.remote.objects import Bucket
from bridge.sources.opening import open_source
from tests.core.remote.s3_client import S3Client
from tests.core.remote.server import S3, Quiet
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, meta, nemo_archive, spelled
from tests.sources.weights.dcp_saves import save

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"


def refusal(model: str) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    return str(caught.value)


@pytest.mark.slow
def test_a_conversion_writes_the_bytes_of_a_local_one(s3: S3Client, tmp_path: Path) -> None:
    far = s3.put(TINY, "bucket/models/tiny")
    bridge.convert(far, "hf", "fp8_pc_pt", tmp_path / "far")
    bridge.convert(TINY, "hf", "fp8_pc_pt", tmp_path / "near")
    for name in ("model.safetensors", "config.json", "hf_quant_config.json", "tokenizer.json"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()


@pytest.mark.slow
def test_where_and_name_are_the_address(s3: S3Client) -> None:
    source = open_source(s3.put(TINY, "bucket/tiny"))
    assert (source.where, source.name) == ("s3://bucket/tiny", "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bin", "legacy", "torchtitan", "megatron", "meta", "nemo"])
def test_other_checkpoints_are_the_same_model_as_here(kind: str, s3: S3Client, tmp_path: Path) -> None:
    hf = llama()
    config: dict[str, Any] | None = None
    if kind in ("bin", "legacy"):
        (tmp_path / "m").mkdir()
        torch.save(hf, tmp_path / "m/pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
        config = CONFIG
    elif kind == "torchtitan":
        save(tmp_path / "m/step-3", spelled(hf, "torchtitan"))
        config = CONFIG
    elif kind == "megatron":
        megatron_bridge(tmp_path / "m", spelled(hf, "megatron"))
    elif kind == "meta":
        hf = {name: tensor[:96] if tensor.shape[0] == 97 else tensor for name, tensor in hf.items()}
        meta(tmp_path / "m", spelled(hf, "meta"), 2, vocab_size=96)
    else:
        (tmp_path / "m").mkdir()
        archive = nemo_archive(tmp_path / "a", {"model_weights.ckpt": spelled(hf, "megatron")})
        archive.rename(tmp_path / "m/model.nemo")
    far = open_source(s3.put(tmp_path / "m", f"bucket/{kind}"), config=config)
    near = open_source(tmp_path / "m", config=config)
    assert far.specs == near.specs and far.config == near.config and far.dropped.keys() == near.dropped.keys()
    for name, tensor in hf.items():
        assert np.array_equal(far.read(name), tensor.numpy())
        assert np.array_equal(far.read_rows(name, 1, 3), tensor.numpy()[1:3])


@pytest.mark.slow
def test_one_archive_is_an_address(s3: S3Client, tmp_path: Path) -> None:
    archive = nemo_archive(tmp_path / "a", {"model_weights.ckpt": spelled(llama(), "megatron")})
    s3.write("bucket/runs/a.nemo", archive.read_bytes())
    assert open_source("s3://bucket/runs/a.nemo").specs == open_source(archive).specs


@pytest.mark.slow
def test_what_is_not_there_is_told(s3: S3Client) -> None:
    assert refusal("s3://bucket/none") == "s3://bucket/none: nothing is there; check the address: bucket/directory"
    assert refusal("s3://no-such/none").startswith("s3://no-such/none: not there; check the address")


def test_missing_credentials_are_told_without_a_word_of_others(s3: S3Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert "access refused (Unable to locate credentials); check the credentials (AWS_PROFILE" in refusal(
        "s3://bucket/m"
    )


@pytest.mark.parametrize("status", [200, 301, 403])
@pytest.mark.parametrize("unsigned", [False, True])
def test_the_region_is_that_which_s3_names(status: int, unsigned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        """Knows where a bucket lies, and lists nothing."""

        def log_message(self, *args: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            signed.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("x-amz-bucket-region", "eu-west-3")
            self.end_headers()

        def do_GET(self) -> None:
            signed.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")

    server = Quiet(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    given = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_CONFIG_FILE": "/nonexistent", **S3}
    for name, value in (given | ({"AWS_SKIP_SIGNATURE": "true"} if unsigned else {})).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    bucket = Bucket("s3://bucket")
    assert not bucket.list() and bucket._config[0]["config"]["region"] == "eu-west-3"
    assert not any(signed) if unsigned else "/eu-west-3/s3/" in signed[-1]
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_an_object_that_changes_is_an_error_where_it_is_read(s3: S3Client) -> None:
    source = open_source(s3.put(TINY, "bucket/tiny"))
    data = bytearray((TINY / "model.safetensors").read_bytes())
    data[-1] ^= 1
    s3.write("bucket/tiny/model.safetensors", bytes(data))
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("model.norm.weight")


def test_other_stores_of_fsspec_are_read_too(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for path in TINY.iterdir():
        fs.pipe_file(f"/m/{path.name}", path.read_bytes())
    source, near = open_source("memory://m"), open_source(TINY)
    assert all(np.array_equal(source.read(name), near.read(name)) for name in near.specs)
    source = open_source("memory://m")
    fs.pipe_file("/m/model.safetensors", b"x" * fs.info("/m/model.safetensors")["size"])
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("lm_head.weight")
    fs.rm("/m", recursive=True)


def test_a_missing_library_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, module in (("s3", "boto3"), ("s3", "obstore"), ("gs", "obstore"), ("az", "obstore")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=rf"what reads {scheme}:// is not installed; pip install .*\[{scheme}\]'"):
            open_source(f"{scheme}://bucket/m")


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(UsageError, match="nothing here knows nope://; known: s3, gs, az, hf, https"):
        open_source("nope://a/b")
