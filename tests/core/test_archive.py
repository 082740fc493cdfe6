"""`.nemo` archives and directories as folders: read in place, nothing followed outside, nothing unpacked."""

from __future__ import annotations

import errno
import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.core.formats.torch_file import TorchFile
from bridge.sources.weights.dcp import Dcp
from bridge.sources.weights.distributed import distributed
from bridge.sources.weights.ranks import Joined, Rank, open_ranks
from bridge.tables.dialects.dialect import Cut
from tests.sources.weights.dcp_saves import read, same, save

STATE = {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.arange(5).to(torch.bfloat16)}


def pack(path: Path, *folders: Path, change: Callable[[tarfile.TarFile], None] | None = None) -> Path:
    """Make an archive as NeMo does: members begin with `./`, directories are members too."""
    with tarfile.open(path, "w:") as tar:
        for folder in folders:
            tar.add(folder, arcname="./")
        if change:
            change(tar)
    return path


def add(tar: tarfile.TarFile, name: str, data: bytes = b"x", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data) if not fields else 0
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data) if not fields else None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "model_config.yaml").write_text("hidden_size: 6\n")
    return tmp_path / "root"


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_folder(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_weights_of_one_rank_are_read_inside_the_archive(root: Path, tmp_path: Path) -> None:
    torch.save(STATE, root / "model_weights.ckpt")
    folder = open_folder(pack(tmp_path / "m.nemo", root))
    assert sorted(folder.files) == ["model_config.yaml", "model_weights.ckpt"]
    assert folder.files["model_config.yaml"].content(1000) == b"hidden_size: 6\n"
    (container,) = open_ranks(folder).values()
    same(container, STATE)
    assert container.files == (folder.files["model_weights.ckpt"],)


def test_directory_and_archive_are_the_same_folder(root: Path, tmp_path: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "x.txt").write_text("y")
    inside, outside = open_folder(pack(tmp_path / "m.nemo", root)), open_folder(root)
    assert inside.files.keys() == outside.files.keys()
    assert list(inside.below("sub/").files) == ["x.txt"]
    assert all(inside.files[name].content(100) == outside.files[name].content(100) for name in inside.files)


def test_distributed_checkpoint_is_read_inside_the_archive(root: Path, tmp_path: Path) -> None:
    save(root / "model_weights", STATE, {"model.a": [((0, 0), (2, 1)), ((0, 1), (2, 2))]})
    (root / "model_weights" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    container = distributed(open_folder(pack(tmp_path / "m.nemo", root)))
    assert isinstance(container, Dcp)
    same(container, STATE)


def test_long_names_and_other_headers_of_tar_read(root: Path, tmp_path: Path) -> None:
    name = "/".join(["long" * 20] * 3) + ".ckpt"
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(tmp_path / "m.nemo", "w:", format=kind) as tar:
            add(tar, f"./{name}", b"data")
        assert open_folder(tmp_path / "m.nemo").files[name].content(10) == b"data"


def test_names_outside_its_directory_refuse_an_archive(root: Path, tmp_path: Path) -> None:
    def change(tar: tarfile.TarFile) -> None:
        for name in ("../outside.txt", "/etc/absolute", "./a/../../up"):
            add(tar, name)

    with pytest.raises(SourceError, match="names outside its directory") as caught:
        open_folder(pack(tmp_path / "m.nemo", root, change=change))
    assert "(../outside.txt, ./a/../../up, /etc/absolute)" in str(caught.value)


def test_names_that_stay_inside_are_read_wherever_they_lead_on_the_way(root: Path, tmp_path: Path) -> None:
    archive = pack(tmp_path / "m.nemo", root, change=lambda tar: add(tar, "./a/../b/./c.ckpt", b"data"))
    assert open_folder(archive).files["b/c.ckpt"].content(10) == b"data"


def test_unsafe_members_are_skipped_and_said(root: Path, tmp_path: Path) -> None:
    def change(tar: tarfile.TarFile) -> None:
        add(tar, "./link", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "./hard", type=tarfile.LNKTYPE, linkname="../../x")
        add(tar, "./pipe", type=tarfile.FIFOTYPE)
        add(tar, "./device", type=tarfile.CHRTYPE)

    folder = open_folder(pack(tmp_path / "m.nemo", root, change=change))
    assert list(folder.files) == ["model_config.yaml"]
    assert folder.skipped == {
        "link": "a link to /etc/passwd",
        "hard": "a link to ../../x",
        "pipe": "not a regular file",
        "device": "not a regular file",
    }


def test_name_twice_is_refused(root: Path, tmp_path: Path) -> None:
    archive = pack(tmp_path / "m.nemo", root, change=lambda tar: add(tar, "model_config.yaml"))
    assert "holds model_config.yaml twice" in refusal(archive)


def test_a_compressed_archive_is_read_from_a_copy_that_ends_with_the_process(root: Path, tmp_path: Path) -> None:
    """As tar reads it; NeMo wrote such archives once. A second opening takes the same copy."""
    torch.save(STATE, root / "model_weights.ckpt")
    archive, temporary = tmp_path / "m.nemo", tmp_path / "temporary"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, arcname="./")
    temporary.mkdir()
    code = (
        "import sys, warnings; from pathlib import Path; from bridge.core.files.archive import open_folder\n"
        "warnings.simplefilter('error' if len(sys.argv) > 2 else 'ignore')\n"
        "folder, again = open_folder(Path(sys.argv[1])), open_folder(Path(sys.argv[1]))\n"
        "span = folder.files['model_config.yaml']; assert again.files == folder.files and span.path.exists()\n"
        "print(sorted(folder.files), span.content(99), span.name == f'{sys.argv[1]}: model_config.yaml')"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code, str(archive)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['model_config.yaml', 'model_weights.ckpt'] b'hidden_size: 6\\n' True\n"
    assert list(temporary.iterdir()) == []
    told = subprocess.run([*command, "-"], env=environment, capture_output=True, text=True, timeout=60).stderr
    assert "m.nemo: compressed; a copy of" in told and list(temporary.iterdir()) == []


def test_a_damaged_or_too_large_compressed_archive_leaves_no_copy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(tmp_path / "whole.nemo", root).read_bytes()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    archive = tmp_path / "m.nemo"
    archive.write_bytes(gzip.compress(whole)[:-9])
    assert "cannot be decompressed (Compressed file ended before" in refusal(archive)
    archive.write_bytes(gzip.compress(whole) + b"more")
    assert "cannot be decompressed (Not a gzipped file" in refusal(archive)
    archive.write_bytes(gzip.compress(b"of another kind" * 100))
    assert "compressed, and what is in it is not a tar archive" in refusal(archive)
    monkeypatch.setattr("shutil.disk_usage", lambda path: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    archive.write_bytes(gzip.compress(whole))
    assert "cannot be decompressed: " in refusal(archive) and "TMPDIR" not in refusal(archive)
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("bridge.core.files.decompressed.SPARE", 1 << 62)
    archive.write_bytes(gzip.compress(whole))
    assert "set TMPDIR to a larger disk" in refusal(archive)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("keep", [100, 512, 3000, -11000])
def test_truncated_archive_is_refused(root: Path, tmp_path: Path, keep: int) -> None:
    (root / "w").write_bytes(bytes(range(256)) * 20)
    archive = pack(tmp_path / "m.nemo", root)
    archive.write_bytes(archive.read_bytes()[:keep])
    assert "truncated" in refusal(archive) or "not a complete tar" in refusal(archive)


@pytest.mark.slow
def test_damaged_archive_reads_or_is_refused(root: Path, tmp_path: Path) -> None:
    torch.save(STATE, root / "model_weights.ckpt")
    archive = pack(tmp_path / "m.nemo", root)
    data, rng, refused = archive.read_bytes(), random.Random(0), 0
    for _ in range(300):
        found = bytearray(data)
        for _ in range(rng.choice([1, 2, 4])):
            header = 512 * rng.randrange(len(data) // 512) if rng.random() < 0.5 else rng.choice([0, 512, 1536])
            found[min(len(data) - 1, header + rng.randrange(512))] = rng.randrange(256)
        archive.write_bytes(found)
        try:
            for container in open_ranks(open_folder(archive)).values():
                assert {name: read(container, name).shape for name in container.specs}
        except SourceError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
        (b"hello" * 200, "not a complete tar archive"),
        (bytes(10240), "an archive without files"),
    ],
)
def test_file_that_is_something_else(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "m.nemo").write_bytes(content)
    assert why in refusal(tmp_path / "m.nemo")


def test_links_of_a_directory_lead_to_files_only(root: Path, tmp_path: Path) -> None:
    """The hub's cache is a directory of links to files; a link to a parent directory would never end."""
    (tmp_path / "blob").write_text("x")
    (root / "file.txt").symlink_to(tmp_path / "blob")
    (root / "up").symlink_to(tmp_path)
    (root / "gone").symlink_to(tmp_path / "nothing")
    os.mkfifo(root / "pipe")
    folder = open_folder(root)
    assert sorted(folder.files) == ["file.txt", "model_config.yaml"]
    assert folder.skipped == {
        "up": "a link to a directory", "gone": f"a link to {tmp_path / 'nothing'}, which is not there",
        "pipe": "not a regular file",
    }  # fmt: skip


def test_archive_that_changed_is_noticed(root: Path, tmp_path: Path) -> None:
    torch.save(STATE, root / "model_weights.ckpt")
    folder = open_folder(pack(tmp_path / "m.nemo", root))
    pack(tmp_path / "m.nemo", root, change=lambda tar: add(tar, "more"))
    with pytest.raises(SourceError, match="changed since it was opened"):
        TorchFile(folder.files["model_weights.ckpt"])


def test_ranks_inside_the_archive(root: Path, tmp_path: Path) -> None:
    for rank, half in enumerate(STATE["model.a"].chunk(2)):
        (root / f"mp_rank_{rank:02}").mkdir()
        torch.save({"model.a": half, "model.b": STATE["model.b"]}, root / f"mp_rank_{rank:02}" / "model_weights.ckpt")
    archive = pack(tmp_path / "m.nemo", root)
    ranks = open_ranks(open_folder(archive))
    assert list(ranks) == [Rank(tp=0), Rank(tp=1)]
    same(Joined(str(archive), ranks, {"model.a": Cut(0), "model.b": None}.__getitem__), STATE)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_refused(kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.txt")
    member.type, member.size = kind, 1 << 44
    path = tmp_path / "model.nemo"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert f"not a complete tar archive (a header of {1 << 44} bytes)" in refusal(path)


@pytest.mark.parametrize("size", [-256, -512, -1024, -(1 << 40)])
def test_a_member_of_negative_size_ends_the_reading(tmp_path: Path, size: int) -> None:
    member = tarfile.TarInfo("a.txt")
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" + (size & ((1 << 88) - 1)).to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    path = tmp_path / "model.nemo"
    path.write_bytes(bytes(head) + bytes(10240))
    with pytest.raises(SourceError, match=r"model.nemo"):
        open_folder(path)
