"""The user's cache: what is read is what was stored, one process makes an entry, and nothing of it fails a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bridge.core.output import cache

KEY, OTHER = cache.digest_of("a"), cache.digest_of("b")
# Waits until the test says so, appends a line for each time that it makes the entry, and prints the entry.
MAKER = """
import sys, time
from pathlib import Path
from bridge.core.output import cache
folder = Path(sys.argv[1])
def make():
    with (folder / "made").open("a") as file:
        file.write("made\\n")
    while not (folder / "go").exists():
        time.sleep(0.01)
    return "a model", b"content"
print(cache.get_or_make("graphs", cache.digest_of("a"), make, bytes.decode))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qbridge" / "graphs"


def once(body: bytes = b"content") -> bytes:
    """What `get_or_make` returns for KEY, with `body` where it is made."""
    return cache.get_or_make("graphs", KEY, lambda: ("a model", body), bytes)


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", MAKER, str(folder)], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    """Wait until a process has written a line."""
    done = threading.Event()
    for _ in range(1200):
        if path.exists() and path.read_text():
            return
        done.wait(0.05)
    raise AssertionError(f"{path} was not written in a minute")


def test_an_entry_is_what_was_stored_and_only_under_its_key(folder: Path) -> None:
    assert cache.load("graphs", KEY) is None
    cache.store("graphs", KEY, "a model", b"content\n\0")
    assert cache.load("graphs", KEY) == b"content\n\0"
    assert cache.load("graphs", OTHER) is None
    assert cache.load("structures", KEY) is None
    (path,) = folder.iterdir()
    path.rename(path.with_name(f"{OTHER[:32]}.cached"))
    assert cache.load("graphs", OTHER) is None


@pytest.mark.parametrize("damage", ["truncated", "changed", "longer", "empty", "text", "list", "deep", "no line"])
def test_a_damaged_file_is_no_entry(folder: Path, damage: str) -> None:
    cache.store("graphs", KEY, "a model", b"content")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    head = whole.partition(b"\n")[0]
    damaged = {
        "truncated": whole[:-1], "changed": whole.replace(b"content", b"contend"), "longer": whole + b"s",
        "empty": b"", "text": b"\xff\xfe", "list": b"[1]\ncontent", "deep": b"[" * 100_000, "no line": head,
    }  # fmt: skip
    path.write_bytes(damaged[damage])
    assert cache.load("graphs", KEY) is None
    assert [entry.bytes for entry in cache.entries()] == [len(damaged[damage])]
    assert once() == b"content"
    assert path.read_bytes() == whole


@pytest.mark.parametrize("where", ["a file", "read-only", "no home"])
def test_a_directory_that_cannot_be_written_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    base = tmp_path / "base"
    base.touch() if where == "a file" else base.mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    if where == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert once() == b"content"
    assert where == "read-only" or cache.entries() == []  # root writes everywhere


def test_the_entry_that_was_not_used_for_longest_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 2)
    for number, name in enumerate("ab"):
        cache.store("graphs", cache.digest_of(name), name, b"")
        os.utime(folder / f"{cache.digest_of(name)[:32]}.cached", (number, number))
    assert cache.load("graphs", cache.digest_of("a")) == b""  # used now
    cache.store("graphs", cache.digest_of("c"), "c", b"")
    assert {entry.what for entry in cache.entries()} == {"a", "c"}


def test_what_killed_writes_left_is_removed_when_they_cannot_run_any_more(folder: Path) -> None:
    cache.store("graphs", KEY, "a model", b"content")
    old, new = folder / f".{KEY[:32]}.cached.7.partial", folder / f".{KEY[:32]}.cached.8.partial"
    foreign = folder / "notes.partial"
    for path in (old, new, foreign):
        path.touch()
        os.utime(path, (1, 1)) if path != new else None
    cache.make_room("graphs")
    assert not old.exists() and new.exists() and foreign.exists()
    os.utime(new, (1, 1))
    cache.clear()
    assert [path.name for path in folder.iterdir()] == ["notes.partial"]


def test_kernels_that_were_not_used_for_longest_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 1)
    kernels = cache.directory("kernels")
    kernels.mkdir(parents=True)
    for number, name in enumerate("ab"):
        path = kernels / f"fp8-{name * 16}.linux-x86-64-v3.so"
        path.touch()
        os.utime(path, (number, number))
    cache.make_room("kernels")
    assert [entry.path.name[4] for entry in cache.entries()] == ["b"]


def test_a_home_that_this_user_cannot_enter_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    assert "cannot be reached: Permission denied; set XDG_CACHE_HOME" in cache.why_disabled()


def test_processes_that_need_one_entry_make_it_once(folder: Path, tmp_path: Path) -> None:
    waiting = [started(tmp_path) for _ in range(3)]
    wait_for(tmp_path / "made")
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=60)[0] for process in waiting] == ["content\n"] * 3
    assert (tmp_path / "made").read_text() == "made\n"
    assert [path.suffix for path in folder.iterdir()] == [".cached"]


def test_threads_that_need_one_entry_make_it_once(folder: Path) -> None:
    begun, go, made = threading.Event(), threading.Event(), []

    def make() -> tuple[str, bytes]:
        made.append(1)
        begun.set()
        assert go.wait(60)
        return "a model", b"content"

    threads = [threading.Thread(target=cache.get_or_make, args=("graphs", KEY, make, bytes)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert made == [1]


def test_a_killed_process_leaves_the_entry_to_the_next(folder: Path, tmp_path: Path) -> None:
    first = started(tmp_path)
    wait_for(tmp_path / "made")
    first.kill()
    first.wait()
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert once(b"mine") == b"mine"
    assert [path.suffix for path in folder.iterdir()] == [".cached"]


def test_nobody_waits_forever_for_a_stopped_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_WAIT", 0.2)
    first = started(tmp_path)
    wait_for(tmp_path / "made")
    first.send_signal(signal.SIGSTOP)
    try:
        assert once(b"mine") == b"mine"
        assert cache.load("graphs", KEY) == b"mine"
    finally:
        first.send_signal(signal.SIGCONT)
        first.kill()
        first.wait()


def test_what_fails_while_it_is_made_is_not_stored_and_is_made_by_the_next(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("graphs", KEY, lambda: ("a model", bytes(1 // 0)), bytes)
    assert list(folder.iterdir()) == []
    assert once() == b"content"


def test_clearing_removes_the_lock_of_a_killed_process_and_of_no_other(folder: Path) -> None:
    cache.store("graphs", KEY, "a model", b"content")
    (folder / f"{KEY[:32]}.lock").touch()
    with cache.exclusively("graphs", OTHER):
        cache.clear()
        assert [path.name for path in folder.iterdir()] == [f"{OTHER[:32]}.lock"]


def test_clearing_removes_every_file_of_the_cache_and_no_other(folder: Path) -> None:
    cache.store("graphs", KEY, "a model", b"content")
    cache.store("structures", KEY, "another", b"")
    kernels = folder.with_name("kernels")
    kernels.mkdir()
    (kernels / "fp8-0123456789abcdef.linux-x86-64-v3.so").write_bytes(b"code")
    foreign = [kernels / "fp8.lock", kernels / "notes", folder / "Microsoft.cached", folder.parent / "mine"]
    for path in foreign:
        path.touch()
    linked = folder / f"{OTHER[:32]}.cached"
    linked.symlink_to(foreign[0])
    (folder.parents[1] / "Microsoft" / "DeveloperTools").mkdir(parents=True)  # of ONNX Runtime
    listed = cache.entries()
    assert [(entry.kind, entry.what, entry.key) for entry in listed] == [
        ("graphs", "a model", KEY[:8]), ("structures", "another", KEY[:8]), ("kernels", "fp8", "01234567"),
    ]  # fmt: skip
    assert cache.clear() == listed
    assert cache.entries() == []
    assert {path for path in folder.parents[1].rglob("*") if path.is_file()} == {*foreign, linked}


def test_an_entry_that_cannot_be_used_is_made_anew(folder: Path) -> None:
    def read(body: bytes) -> bytes:
        if body != b"content":
            raise ValueError("not of this form")
        return body

    cache.store("graphs", KEY, "a model", b"of another form")
    assert cache.get_or_make("graphs", KEY, lambda: ("a model", b"content"), read) == b"content"
    assert cache.load("graphs", KEY) == b"content"


def test_who_waits_for_another_process_says_so(folder: Path, tmp_path: Path) -> None:
    first = started(tmp_path)
    wait_for(tmp_path / "made")
    waits: list[int] = []

    def waiting() -> None:
        waits.append(1)
        threading.Timer(5 * cache.POLL, (tmp_path / "go").touch).start()

    assert cache.get_or_make("graphs", KEY, lambda: ("a model", b"mine"), bytes, waiting) == b"content"
    assert waits == [1]
    assert first.wait(60) == 0


def test_only_the_user_enters_the_directories_that_are_made(folder: Path) -> None:
    cache.store("graphs", KEY, "a model", b"content")
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o757])
def test_what_others_can_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    assert bool(cache.why_untrusted(place)) == bool(mode & 0o022)


def test_a_link_and_what_another_user_owns_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    assert cache.why_untrusted(link) == f"{link} is a symbolic link"
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    real = place.lstat()
    for owner, reason in ((os.getuid(), ""), (0, ""), (os.getuid() + 1, f"{place} belongs to another user")):
        status = os.stat_result((*real[:4], owner, *real[5:]))
        monkeypatch.setattr(Path, "lstat", lambda _, status=status: status)
        assert cache.why_untrusted(place) == reason


def test_a_relative_cache_home_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.directory("graphs") == tmp_path / "home" / ".cache" / "qbridge" / "graphs"
