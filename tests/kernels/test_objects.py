"""Where machine code of kernels is looked for: what another user may have written is not loaded."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge._kernels import native, objects
from bridge.cli.terminal import Exit, session
from bridge.core.errors import BridgeWarning, CannotRun
from bridge.core.output import cache

CODE = objects.sealed(b"machine code")


class Compiled(Exception):
    """`stored` would compile."""


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole file of the user's cache; nothing lies beside the kernels."""

    def compiled(module: str, directory: Path, linked: bool) -> Path:
        raise Compiled(directory)

    beside = tmp_path / "beside" / "objects"  # its parent is not there: nothing can be written
    monkeypatch.setattr(objects, "BESIDE", beside)
    monkeypatch.setattr(objects, "_compiled", compiled)
    objects._say_again.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "qbridge" / "kernels" / f"{objects.file_name('smooth', objects.level())}{objects.LINKED}"
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(CODE)
    path.chmod(0o644)
    return path


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = Path.lstat

    def changed(self: Path) -> os.stat_result:
        real = lstat(self)
        return os.stat_result((*real[:4], 12345, *real[5:])) if self == path else real

    monkeypatch.setattr(Path, "lstat", changed)


def test_a_file_of_the_users_own_is_taken(cached: Path) -> None:
    assert objects.stored("smooth") == cached


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_compiled_again(cached: Path, mode: int) -> None:
    cached.chmod(mode)
    with pytest.raises(Compiled, match=str(cached.parent)):
        objects.stored("smooth")


def test_a_file_of_another_user_or_behind_a_link_is_compiled_again(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        of_another_user(cached, other)
        with pytest.raises(Compiled):
            objects.stored("smooth")
    real = cached.rename(cached.with_name("real"))
    cached.symlink_to(real)
    with pytest.raises(Compiled):
        objects.stored("smooth")


@pytest.mark.parametrize("mode", [0o775, 0o777])
@pytest.mark.parametrize("above", [False, True])
def test_a_directory_that_others_can_write_is_closed_to_them(cached: Path, mode: int, above: bool) -> None:
    place = cached.parent.parent if above else cached.parent
    place.chmod(mode)
    assert objects.stored("smooth") == cached
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_directory_whose_own_directory_is_another_users_is_not_read(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_user(cached.parent.parent, monkeypatch)
    with (
        pytest.warns(BridgeWarning, match=rf"{cached.parent.parent} belongs to another user"),
        pytest.raises(Compiled),
    ):
        objects.stored("smooth")


def test_a_directory_of_another_user_or_behind_a_link_is_neither_read_nor_written(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(reason: str) -> None:
        text = rf"compiled again in every process.*{cached.parent} {reason}; set XDG_CACHE_HOME"
        with pytest.warns(BridgeWarning, match=text), pytest.raises(Compiled, match=str(objects._temporary())):
            objects.stored("smooth")

    with monkeypatch.context() as other:
        of_another_user(cached.parent, other)
        refused("belongs to another user")
    real = cached.parent.rename(cached.parent.with_name("real"))
    cached.parent.symlink_to(real, target_is_directory=True)
    refused("is a symbolic link")


def test_the_directory_that_is_made_is_the_users_alone(cached: Path) -> None:
    cached.unlink()
    cached.parent.rmdir()
    with pytest.raises(Compiled, match=str(cached.parent)):
        objects.stored("smooth")
    assert cached.parent.stat().st_mode & 0o777 == 0o700


def test_a_relative_cache_home_counts_as_none(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert list(objects._directories()) == [objects.BESIDE, tmp_path / "home" / ".cache" / "qbridge" / "kernels"]


@pytest.fixture
def library() -> Iterator[Path]:
    native._addresses.cache_clear()
    yield Path("/noexec/smooth.so")
    native._addresses.cache_clear()


def test_a_library_that_the_system_does_not_load_is_replaced_by_object_files(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "smooth"
    plain.write_bytes(objects.sealed(objects.packed({"smooth": "symbol"}, [b"object file"])))

    def load(path: Path) -> dict[str, int]:
        raise OSError(f"{path}: failed to map segment from shared object")

    def link(module: str, names: dict[str, str], parts: list[bytes]) -> dict[str, int]:
        assert (module, names, parts) == ("smooth", {"smooth": "symbol"}, [b"object file"])
        return {"smooth": 7}

    monkeypatch.setattr(native, "stored", lambda module, linked=True: library if linked else plain)
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "link", link)
    assert native._addresses("smooth") == {"smooth": 7}


def test_object_files_are_compiled_where_a_library_is_of_no_use(cached: Path) -> None:
    with pytest.raises(Compiled):
        objects.stored("smooth", linked=False)
    plain = cached.with_suffix("")
    plain.write_bytes(CODE)
    plain.chmod(0o600)
    assert objects.stored("smooth", linked=False) == plain
    assert objects.stored("smooth") == cached


def test_code_of_a_lower_level_serves_a_higher_one(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, found in (("x86-64-v3", True), ("x86-64-v4", True)):
        monkeypatch.setattr(objects, "level", lambda here=here: here)
        lower = cached.with_name(f"{objects.file_name('smooth', 'x86-64-v3')}{objects.LINKED}")
        if cached != lower and cached.exists():
            cached.rename(lower)
        assert (objects.stored("smooth") == lower) is found
    higher = lower.rename(lower.with_name(f"{objects.file_name('smooth', 'x86-64-v4')}{objects.LINKED}"))
    assert objects.stored("smooth") == higher
    monkeypatch.setattr(objects, "level", lambda: "x86-64-v3")
    with pytest.raises(Compiled):
        objects.stored("smooth")


def test_a_processor_without_a_level_is_known_by_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    monkeypatch.setattr(objects, "_features", lambda: {"avx"})
    levels = set()
    for features in ({"avx": True, "avx2": True}, {"avx": True, "avx2": False}, {"avx": True}):
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda features=features: features)
        objects.level.cache_clear()
        levels.add(objects.level())
    objects.level.cache_clear()
    assert len(levels) == 2


def test_what_is_compiled_by_others_meanwhile_is_taken(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that find nothing wait for the one that compiles."""
    away = cached.rename(cached.with_name("away"))

    @contextmanager
    def exclusively(kind: str, key: str) -> Iterator[None]:
        assert kind == "kernels" and key
        away.rename(cached)
        yield

    monkeypatch.setattr(cache, "exclusively", exclusively)
    assert objects.stored("smooth") == cached


def test_a_user_of_the_command_reads_why_kernels_are_compiled_again(
    cached: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    of_another_user(cached.parent, monkeypatch)
    with pytest.raises(Exit), session():  # `Compiled` is no error of ours
        objects.stored("smooth")
    assert "belongs to another user; set XDG_CACHE_HOME to one that only you can write" in capfd.readouterr().err


def test_compiling_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []

    def run(command: Any, **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no compiler")

    monkeypatch.setattr(subprocess, "run", run)
    objects._say_once.cache_clear()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for linked in (True, False):
            with pytest.raises(CannotRun, match="no compiler"):
                objects._compiled("smooth", tmp_path, linked)
    (message,) = messages
    assert message.category is BridgeWarning
    assert str(message.message).startswith("kernels are compiled for this processor")
    assert ["--unlinked" in command for command in commands] == [False, True]
