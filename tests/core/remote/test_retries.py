"""What passes is asked for again, so often and no more; idle connections, signatures and proxies come and go."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bridge.errors import SourceError, UsageError
from bridge.remote.address import Look
from bridge.remote.client import HEADWAY, MOST, Client
from bridge.remote.http import TOGETHER, HttpStore
from bridge.remote.hub import HubAddress
from bridge.remote.objects import _Signed
from bridge.sources import open_source
from tests.remote.server import serving

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
FILE = "model.safetensors"
SIZE = (TINY / FILE).stat().st_size


class Plain:
    """An address that never runs out."""

    where, hint = "here", "ask"

    def __init__(self, url: str) -> None:
        self._url = url

    def request(self) -> tuple[str, Mapping[str, str]]:
        return self._url, {}

    def moved(self, url: str) -> None:
        """It does not matter."""

    def refused(self, url: str) -> bool:
        return False


def look(client: Client, address: object):  # type: ignore[no-untyped-def]
    found = client.look(address)  # type: ignore[arg-type]
    assert found
    return found


def test_what_ran_out_is_signed_once_for_all_who_share_it() -> None:
    class Signer:
        made = 0

        def sign(self, path: str, expiration: int) -> str:
            self.made += 1
            manners.query = f"s={self.made}" if self.made > 1 else manners.query
            return f"{url}/{path}?s={self.made}"

    with serving(TINY, query="s=1") as (url, manners):
        signer, client = Signer(), Client(pause=0.01)
        address = _Signed(signer, FILE, "s3://b/m")
        known = look(client, address)
        manners.query = "s=2"

        def fetch(at: int) -> bytes:
            out = bytearray(100)
            client.fetch(address, at * 100, memoryview(out), known)
            return bytes(out)

        for turn in range(5):  # more often than one request may be refused
            barred = threading.Barrier(16)
            with ThreadPoolExecutor(16) as pool:
                got = list(pool.map(lambda at, b=barred: (b.wait(), fetch(at))[1], range(16)))
            data = (TINY / FILE).read_bytes()
            assert got == [data[at * 100 : at * 100 + 100] for at in range(16)] and signer.made == 2 + turn
            manners.query = "s=none"


def test_the_hub_is_asked_by_one_of_those_whose_address_ran_out() -> None:
    with serving(TINY) as (store, manners):
        asked: list[str] = []
        address, client = HubAddress("http://hub.invalid/f", "hf://o/m/f", {}), Client(pause=0.01)
        request = address.request

        def counted() -> tuple[str, Mapping[str, str]]:
            url, headers = request()
            if url.startswith("http://hub."):
                asked.append(url)
                time.sleep(0.05)
                manners.query = f"{len(asked)}"
                address.moved(f"{store}/{FILE}?{len(asked)}")  # as the redirection does
                url, _ = request()
            return url, headers

        address.request = counted  # type: ignore[method-assign]
        known = look(client, address)
        for turn in range(5):
            manners.query = "none"
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda at: client.fetch(address, at, memoryview(bytearray(10)), known), range(16)))
            assert len(asked) == 2 + turn


def test_an_old_address_that_is_refused_does_not_undo_a_newer_one() -> None:
    address = HubAddress("http://hub.invalid/f", "hf://o/m/f", {})
    address.moved("http://store.invalid/1")
    address.moved("http://store.invalid/2")
    assert address.refused("http://store.invalid/1") and address.request()[0] == "http://store.invalid/2"
    assert address.refused("http://store.invalid/2") and address.request()[0] == "http://hub.invalid/f"
    assert not address.refused("http://hub.invalid/f")


def test_what_stays_refused_is_a_refusal_after_a_few_signatures() -> None:
    class Signer:
        def sign(self, path: str, expiration: int) -> str:
            return f"{url}/{path}"

    with serving(TINY, query="none") as (url, manners):
        with pytest.raises(SourceError, match=r"s3://b/m: access refused \(403 Forbidden\); check the cred"):
            Client(pause=0.01).look(_Signed(Signer(), FILE, "s3://b/m"))
        assert len(manners.headers) == 4


def test_a_signer_that_fails_is_one_clear_error() -> None:
    class NoCredentialsError(Exception):
        """As botocore's."""

    class Signer:
        def sign(self, path: str, expiration: int) -> str:
            raise NoCredentialsError("Unable to locate credentials")

    with pytest.raises(SourceError, match=r"access refused \(Unable to locate credentials\); check the cred"):
        Client().look(_Signed(Signer(), FILE, "s3://b/m"))


def test_connections_that_the_server_closed_meanwhile_are_no_failures() -> None:
    with serving(TINY, keep=0.2) as (url, _):
        client = Client(tries=1)
        address = Plain(f"{url}/{FILE}")
        known = look(client, address)
        with ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                list(pool.map(lambda at: client.fetch(address, at, memoryview(bytearray(10)), known), range(8)))
                time.sleep(0.5)


@pytest.mark.parametrize(
    ("drop", "most"), [(1, 3), (HEADWAY - 1, 3 + (SIZE // HEADWAY)), (HEADWAY, MOST)], ids=["byte", "less", "enough"]
)
def test_a_server_that_always_breaks_off_is_asked_so_often_and_no_more(drop: int, most: int, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(bytes(HEADWAY * (MOST + 2)))
    with serving(tmp_path) as (url, manners):
        client, address = Client(tries=3, pause=0.0001), Plain(f"{url}/{FILE}")
        known = look(client, address)
        manners.drop_after, manners.headers = drop, []
        with pytest.raises(SourceError, match="times in "):
            client.fetch(address, 0, memoryview(bytearray(known.nbytes)), known)
        assert 3 <= len(manners.headers) <= max(most, 3)


def test_every_failure_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(TINY) as (url, manners):
        client, address = Client(tries=3), Plain(f"{url}/{FILE}")
        known = look(client, address)
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
        assert look(Client(), address).nbytes == SIZE
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(SourceError, match="the proxy refuses; give it a user"):
            Client().look(address)
        assert manners.headers
    with pytest.raises(SourceError, match=r"the connection to the proxy 127.0.0.1:\d+ broke \(Connection refused\)"):
        Client(tries=1).look(address)


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
        Client().look(Plain(f"{server}/{FILE}"))
    assert "cret" not in str(told.value)
    monkeypatch.setenv("no_proxy", "models.invalid")
    with pytest.raises(SourceError, match=r"no server .* is known"):
        Client().look(Plain(f"{server}/{FILE}"))


def test_a_proxy_for_all_protocols_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(TINY) as (proxy, _):
        monkeypatch.setenv("all_proxy", proxy)
        assert look(Client(), Plain(f"http://models.invalid/{FILE}")).nbytes == SIZE


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
        Client(timeout=0.1, pause=0.01).fetch(Plain(url), 0, memoryview(bytearray(10)), Look(10, ""))
    assert len(taken) == 6


def open_files() -> int:
    here = Path("/proc/self/fd")
    return len(list(here.iterdir())) if here.is_dir() else 0


def remote_threads() -> int:
    return sum(thread.name.startswith("remote_") for thread in threading.enumerate())


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
from tests.remote.server import serving
from pathlib import Path
from bridge.cli import main
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


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_a_run_whose_server_says_nothing(number: int, tmp_path: Path) -> None:
    program = STOPPED
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out"), str(number)], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=25, check=False,
    )  # fmt: skip
    assert run.returncode == 128 + number and "nothing half-written is left" in run.stderr, run.stderr
    assert not list(tmp_path.iterdir())


def test_a_source_can_be_read_again_after_a_run_was_stopped() -> None:
    with serving(TINY) as (url, _):
        source = open_source(url)
        tree = source.root.tree  # type: ignore[attr-defined]
        tree.give_up()
        with pytest.raises(SourceError, match="reading was given up"):
            source.read("model.norm.weight")
        tree.go_on()
        assert (source.read("model.norm.weight") == open_source(TINY).read("model.norm.weight")).all()
