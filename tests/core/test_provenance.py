"""What tells the code that makes a kept file from other code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bridge.core.output import provenance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory with what an installer writes of a package that is called `mine`."""
    directory = tmp_path / "mine-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (directory / "RECORD").write_text("mine.py,sha256=a,1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return directory


def origin(package: Path, **address: object) -> str:
    (package / "direct_url.json").write_text(json.dumps({"url": "file:///mine", **address}))
    provenance.origin.cache_clear()
    return provenance.origin("mine")


def test_a_package_of_a_registry_is_known_by_its_version(package: Path) -> None:
    provenance.origin.cache_clear()
    assert provenance.origin("mine") == provenance.origin("absent") == ""


def test_a_package_of_an_address_is_known_by_its_files(package: Path) -> None:
    first = origin(package, dir_info={})
    assert first
    assert origin(package, dir_info={}) == first
    assert origin(package, vcs_info={"commit_id": "1"}) != first
    (package / "RECORD").write_text("mine.py,sha256=b,1\n")
    assert origin(package, dir_info={}) != first


def test_an_editable_package_can_change(package: Path) -> None:
    assert not provenance.can_change(["mine"])
    assert origin(package, dir_info={"editable": True}) == "editable"
    assert provenance.can_change(["numpy", "mine"])


def test_each_file_of_code_decides_on_its_digest(tmp_path: Path) -> None:
    package, tables = tmp_path / "package", tmp_path / "tables"
    for path in (package / "inner" / "code.py", tables / "llama.toml"):
        path.parent.mkdir(parents=True)
        path.write_text("a")
    digests = [provenance.digest_of_files(package, tables)]
    (package / "notes.txt").write_text("not code")
    assert provenance.digest_of_files(package, tables) == digests[0]
    (tables / "llama.toml").write_text("b")
    digests.append(provenance.digest_of_files(package, tables))
    (package / "inner" / "code.py").rename(package / "inner" / "other.py")
    digests.append(provenance.digest_of_files(package, tables))
    assert len({*digests}) == 3
