"""What passes is asked for again, so often and no more; idle connections, signatures and proxies come and go."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bridge.core.errors import SourceError, UsageError
from bridge.core.remote.client import HEADWAY, MAX_FAILURES, Client
from bridge.core.remote.http import TOGETHER, HttpStore
from bridge.core.remote.hub import HubAddress
from bridge.core.remote.store import RemoteStat
from bridge.sources.opening import open_source
from tests.core.remote.server import serving

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
FILE = "model.safetensors"
SIZE = (TINY / FILE).stat().st_size


class Plain:
    """An address that never runs out."""

    where, hint = "here", "ask"

    def __init__(self, url: str) -> None:
        self._url = url

    def request(self) -> tuple[str, Mapping[str, str]]:
        return self._url, {}

    def refused(self, url: str) -> bool:
        return False


def stat(client: Client, address: object):  # type: ignore[no-untyped-def]
    found = client.stat(address)  # type: ignore[arg-type]
    assert found
    return found


class Stored(HubAddress):
    """A file of the hub that says, each time that it is asked, that it is stored at another address."""

    def __init__(self, where: Callable[[int], str], url: str = "http://hub.invalid/f") -> None:
        super().__init__(url, "hf://o/m/f", None)
        self.asked, self._told = 0, where

    def _located(self) -> str:
        self.asked += 1
        return self._told(self.asked)


@pytest.mark.slow
def test_the_hub_is_asked_by_one_of_those_whose_address_ran_out() -> None:
    with serving(TINY) as (store, manners):

        def told(number: int) -> str:
            time.sleep(0.05)
            manners.query = f"{number}"
            return f"{store}/{FILE}?{number}"

        address, client = Stored(told), Client(pause=0.01)
        known = stat(client, address)

        def fetch(at: int) -> bytes:
            out = bytearray(100)
            client.fetch(address, at * 100, memoryview(out), known)
            return bytes(out)

        for turn in range(5):  # more often than one request may be refused
            manners.query = "none"
            barred = threading.Barrier(16)
            with ThreadPoolExecutor(16) as pool:
                got = list(pool.map(lambda at, b=barred: (b.wait(), fetch(at))[1], range(16)))
            data = (TINY / FILE).read_bytes()
            assert got == [data[at * 100 : at * 100 + 100] for at in range(16)] and address.asked == 2 + turn


def test_an_old_address_that_is_refused_does_not_undo_a_newer_one() -> None:
    address = Stored(lambda number: f"http://store.invalid/{number}")
    assert address.request()[0] == "http://store.invalid/1"
    assert address.refused("http://store.invalid/1") and address.request()[0] == "http://store.invalid/2"
    assert address.refused("http://store.invalid/1") and address.request()[0] == "http://store.invalid/2"
    assert not address.refused("http://hub.invalid/f")


def test_what_stays_refused_is_a_refusal_after_a_few_addresses() -> None:
    with serving(TINY, query="none") as (url, manners):
        with pytest.raises(SourceError, match=r"hf://o/m/f: access refused \(403 Forbidden\); request access"):
            Client(pause=0.01).stat(Stored(lambda number: f"{url}/{FILE}"))
        assert len(manners.headers) == 4


def test_connections_that_the_server_closed_meanwhile_are_no_failures() -> None:
    with serving(TINY, keep=0.2) as (url, _):
        client = Client(tries=1)
        address = Plain(f"{url}/{FILE}")
        known = stat(client, address)
        with ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                list(pool.map(lambda at: client.fetch(address, at, memoryview(bytearray(10)), known), range(8)))
                time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "most"),
    [(1, 3), (HEADWAY - 1, 3 + (SIZE // HEADWAY)), (HEADWAY, MAX_FAILURES)],
    ids=["byte", "less", "enough"],
)
def test_a_server_that_always_breaks_off_is_asked_so_often_and_no_more(drop: int, most: int, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(bytes(HEADWAY * (MAX_FAILURES + 2)))
    with serving(tmp_path) as (url, manners):
        client, address = Client(tries=3, pause=0.0001), Plain(f"{url}/{FILE}")
        known = stat(client, address)
        manners.drop_after, manners.headers = drop, []
        with pytest.raises(SourceError, match="times in "):
            client.fetch(address, 0, memoryview(bytearray(known.nbytes)), known)
        assert 3 <= len(manners.headers) <= max(most, 3)


def test_every_failure_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(TINY) as (url, manners):
        client, address = Client(tries=3), Plain(f"{url}/{FILE}")
        known = stat(client, address)
        paused: list[float] = []
        monkeypatch.setattr(client.given_up, "wait", lambda seconds: paused.append(seconds))
        manners.drop_after, manners.drops = HEADWAY, 2
        client.fetch(address, 0, memoryview(bytearray(known.nbytes)), known)
        assert len(paused) == 2 and min(paused) > 0.01


def test_a_proxy_learns_who_asks_and_the_server_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(TINY, proxied="Basic bWU6c0BjcmV0") as (proxy, manners):
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy.replace("http://", "http://me:s%40cret@"))
        monkeypatch.setenv("no_proxy", "")
        address = Plain(f"http://models.invalid/{FILE}")
        assert stat(Client(), address).nbytes == SIZE
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(SourceError, match="the proxy refuses; give it a user"):
            Client().stat(address)
        assert manners.headers
    with pytest.raises(SourceError, match=r"the connection to the proxy 127.0.0.1:\d+ broke \(Connection refused\)"):
        Client(tries=1).stat(address)


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks4"])
@pytest.mark.parametrize("word", ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_of_another_protocol_is_refused(word: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = f"{'https' if word == 'HTTPS_PROXY' else 'http'}://models.invalid"
    monkeypatch.setenv("no_proxy", "")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(word, f"{scheme}://me:se/cret@127.0.0.1:9")
    with pytest.raises(UsageError, match=f"^{server}: {word} names a {scheme}:// proxy, which cannot be used") as told:
        Client().stat(Plain(f"{server}/{FILE}"))
    assert "cret" not in str(told.value)
    monkeypatch.setenv("no_proxy", "models.invalid")
    with pytest.raises(SourceError, match=r"no server .* is known"):
        Client().stat(Plain(f"{server}/{FILE}"))


def test_a_proxy_for_all_protocols_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(TINY) as (proxy, _):
        monkeypatch.setenv("all_proxy", proxy)
        assert stat(Client(), Plain(f"http://models.invalid/{FILE}")).nbytes == SIZE


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that accepts connections and says nothing, and those it has."""
    taken: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                taken.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
    for one in taken:
        one.close()


def test_a_server_that_never_said_anything_is_asked_twice(silent: tuple[str, list[socket.socket]]) -> None:
    url, taken = silent
    with pytest.raises(SourceError, match=r"json: no answer in time, 2 times in a row; check the network"):
        HttpStore(url, Client(timeout=0.3, pause=0.01))
    assert len(taken) <= 2 * TOGETHER


def test_bytes_of_a_listed_file_are_asked_for_as_often_as_ever(silent: tuple[str, list[socket.socket]]) -> None:
    url, taken = silent
    with pytest.raises(SourceError, match=r"no answer in time, 6 times in a row"):
        Client(timeout=0.1, pause=0.01).fetch(Plain(url), 0, memoryview(bytearray(10)), RemoteStat(10, ""))
    assert len(taken) == 6


def open_files() -> int:
    here = Path("/proc/self/fd")
    return len(list(here.iterdir())) if here.is_dir() else 0


def remote_threads() -> int:
    return sum(thread.name.startswith("remote_") for thread in threading.enumerate())


@pytest.mark.slow
def test_a_model_that_is_let_go_of_leaves_no_thread_and_no_connection() -> None:
    with serving(TINY) as (url, _):
        before, files = remote_threads(), open_files()
        for _ in range(4):
            source = open_source(url)
            source.read("lm_head.weight")
            del source
        end = time.monotonic() + 10
        while (remote_threads() > before or open_files() > files) and time.monotonic() < end:
            time.sleep(0.01)  # the server closes its own
        assert remote_threads() <= before and open_files() <= files


STOPPED = """
import os, sys, threading
from tests.core.remote.server import serving
from pathlib import Path
from bridge.cli.main import main
number = int(sys.argv[2])
with serving(Path("examples/models/tiny-llama"), deaf=1 << 17) as (url, manners):
    def stop():
        manners.deafened.wait()
        threading.Event().wait(0.3)
        os.kill(os.getpid(), number)
    threading.Thread(target=stop, daemon=True).start()
    sys.argv = ["qbridge", "convert", url, "--target", "hf", "--quant", "int8_wo", "--out", sys.argv[1]]
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_a_run_whose_server_says_nothing(number: int, tmp_path: Path) -> None:
    program = STOPPED
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out"), str(number)], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=25, check=False,
    )  # fmt: skip
    assert run.returncode == 128 + number and "nothing half-written is left" in run.stderr, run.stderr
    assert not list(tmp_path.iterdir())


def test_a_source_can_be_read_again_after_a_run_was_stopped() -> None:
    with serving(TINY) as (url, _):
        source = open_source(url)
        given_up = source.root.tree.store.given_up  # type: ignore[attr-defined]
        given_up.set()
        with pytest.raises(SourceError, match="reading was given up"):
            source.read("model.norm.weight")
        given_up.clear()
        assert (source.read("model.norm.weight") == open_source(TINY).read("model.norm.weight")).all()
