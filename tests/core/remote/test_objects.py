"""Models in an S3 bucket, on a real server: every kind of checkpoint, read in place, and what a store refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.errors import SourceError, UsageError
from bridge.sources import open_source
from tests.sources.dcp_saves import save
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, meta, nemo_archive, spelled

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"


def put(fs: Any, root: Path, to: str) -> str:
    for path in root.rglob("*"):
        if path.is_file():
            fs.put_file(str(path), f"{to}/{path.relative_to(root).as_posix()}")
    return f"s3://{to}"


def refusal(model: str) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    return str(caught.value)


def test_a_conversion_writes_the_bytes_of_a_local_one(s3: Any, tmp_path: Path) -> None:
    far = put(s3, TINY, "bucket/models/tiny")
    bridge.convert(far, "hf", "fp8_pc_pt", tmp_path / "far")
    bridge.convert(TINY, "hf", "fp8_pc_pt", tmp_path / "near")
    for name in ("model.safetensors", "config.json", "hf_quant_config.json", "tokenizer.json"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()


def test_a_conversion_that_reads_straight_writes_the_same_bytes(
    straight: list[tuple[int, int]], s3: Any, tmp_path: Path
) -> None:
    bridge.convert(put(s3, TINY, "bucket/tiny"), "hf", "fp8_pc_pt", tmp_path / "far")
    bridge.convert(TINY, "hf", "fp8_pc_pt", tmp_path / "near")
    name = "model.safetensors"
    assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
    assert straight


def test_where_and_name_are_the_address(s3: Any) -> None:
    source = open_source(put(s3, TINY, "bucket/tiny"))
    assert (source.where, source.name) == ("s3://bucket/tiny", "tiny")


@pytest.mark.parametrize("kind", ["bin", "legacy", "torchtitan", "megatron", "meta", "nemo"])
def test_other_checkpoints_are_the_same_model_as_here(kind: str, s3: Any, tmp_path: Path) -> None:
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
    far = open_source(put(s3, tmp_path / "m", f"bucket/{kind}"), config=config)
    near = open_source(tmp_path / "m", config=config)
    assert far.specs == near.specs and far.config == near.config and far.dropped.keys() == near.dropped.keys()
    for name, tensor in hf.items():
        assert np.array_equal(far.read(name), tensor.numpy())
        assert np.array_equal(far.read_rows(name, 1, 3), tensor.numpy()[1:3])


def test_one_archive_is_an_address(s3: Any, tmp_path: Path) -> None:
    archive = nemo_archive(tmp_path / "a", {"model_weights.ckpt": spelled(llama(), "megatron")})
    s3.put_file(str(archive), "bucket/runs/a.nemo")
    assert open_source("s3://bucket/runs/a.nemo").specs == open_source(archive).specs


def test_what_is_not_there_is_told(s3: Any) -> None:
    assert refusal("s3://bucket/none") == "s3://bucket/none: nothing is there; check the address: bucket/directory"
    assert refusal("s3://no-such/none").startswith("s3://no-such/none: not there; check the address")


def test_missing_credentials_are_told_without_a_word_of_others(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    assert "access refused (Unable to locate credentials); check the credentials (AWS_PROFILE" in refusal(
        "s3://bucket/m"
    )


def test_an_object_that_changes_is_an_error_where_it_is_read(s3: Any) -> None:
    source = open_source(put(s3, TINY, "bucket/tiny"))
    data = bytearray((TINY / "model.safetensors").read_bytes())
    data[-1] ^= 1
    s3.pipe_file("bucket/tiny/model.safetensors", bytes(data))
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
    from fsspec.registry import _registry

    for scheme, module in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.delitem(_registry, scheme, raising=False)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            UsageError, match=rf"what reads {scheme}:// is not installed; pip install 'qbridge\[{scheme}\]'"
        ):
            open_source(f"{scheme}://bucket/m")


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(UsageError, match="nothing here knows nope://; known: s3, gs, hf, https"):
        open_source("nope://a/b")
