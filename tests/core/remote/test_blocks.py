"""Blocks of remote files: the bytes of the file whatever is asked for, by any number of threads, within bounds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bridge.core.errors import SourceError
from bridge.core.remote.blocks import Blocks

DATA = np.random.default_rng(0).integers(0, 256, 100_003, np.uint8).tobytes()


class Store:
    """Fetches of one file, counted; `fails`: so many of the next."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = 0
        self.lock = threading.Lock()

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        with self.lock:
            self.asked.append(begin)
            failing, self.fails = self.fails > 0, max(self.fails - 1, 0)
        if failing:
            raise SourceError("broken")
        out[:] = DATA[begin : begin + len(out)]


def read(blocks: Blocks, begin: int, end: int) -> bytes:
    out = bytearray(end - begin)
    blocks.read("a", len(DATA), begin, memoryview(out))
    return bytes(out)


@pytest.mark.slow
def test_every_run_is_that_of_the_file() -> None:
    blocks, numbers = Blocks(Store().fetch, memory=4000, block=1000), np.random.default_rng(1)
    for _ in range(200):
        begin, end = sorted(int(n) for n in numbers.integers(0, len(DATA) + 1, 2))
        assert read(blocks, begin, end) == DATA[begin:end]


@pytest.mark.parametrize("memory", [2000, 8000, 200_000])
def test_threads_that_share_few_blocks_all_get_theirs(memory: int) -> None:
    blocks = Blocks(Store().fetch, memory=memory, block=1000, connections=3)

    def walk(first: int) -> bool:
        return all(read(blocks, at, at + 700) == DATA[at : at + 700] for at in range(first, len(DATA) - 700, 650))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(walk, range(0, 80_000, 10_000)))


def test_a_file_read_forward_is_fetched_once() -> None:
    store = Store()
    blocks = Blocks(store.fetch, memory=8000, block=1000)
    for at in range(0, len(DATA), 100):
        read(blocks, at, min(at + 100, len(DATA)))
    assert sorted(store.asked) == list(range(0, len(DATA), 1000))


class Slow(Store):
    """Takes its time; `most`: fetches that were under way at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.now, self.most = seconds, 0, 0

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        super().fetch(name, begin, out)
        with self.lock:
            self.now -= 1


class Held(Store):
    """Answers nobody until `wanted` fetches are under way at once, for ten seconds at most."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted, self.now, self.most, self.changed = wanted, 0, 0, threading.Condition()

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.wanted, timeout=10)
        super().fetch(name, begin, out)
        with self.changed:
            self.now -= 1


@pytest.mark.parametrize("readers", [1, 4, 6])
def test_a_server_that_takes_its_time_is_asked_for_more_at_once(readers: int) -> None:
    store = Held(16)
    blocks = Blocks(store.fetch, memory=200_000, block=1000, connections=16)

    def walk(reader: int) -> None:
        for at in range(reader * 16_000, (reader + 1) * 16_000, 500):
            read(blocks, at, at + 500)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(walk, range(readers)))
    assert store.most == 16


def test_blocks_that_nobody_came_for_do_not_end_the_asking_ahead() -> None:
    store = Slow(0.002)
    blocks = Blocks(store.fetch, memory=16_000, block=1000)
    for part in range(12):
        store.most = 0
        for at in range(part * 8000, part * 8000 + 5000, 500):  # what follows is asked for, and skipped
            read(blocks, at, at + 500)
    assert store.most >= 2


def test_what_fits_is_fetched_once_though_it_is_read_twice() -> None:
    store = Store()
    blocks = Blocks(store.fetch, memory=40_000, block=1000, ahead=False)
    for _ in range(2):
        for at in range(0, 18_000, 500):
            read(blocks, at, at + 500)
    assert sorted(store.asked) == list(range(0, 18_000, 1000))


def test_blocks_take_no_more_memory_than_was_promised() -> None:
    blocks = Blocks(Store().fetch, memory=8000, block=1000)
    for _ in range(2):
        for at in range(0, 60_000, 500):
            read(blocks, at, at + 500)
            assert len(blocks._blocks) <= 8


def test_nothing_is_asked_for_ahead_of_headers() -> None:
    store = Store()
    read(Blocks(store.fetch, memory=8000, block=1000, ahead=False), 10, 20)
    assert store.asked == [0]


def test_an_error_is_told_to_who_reads_and_not_kept() -> None:
    store = Store()
    blocks = Blocks(store.fetch, memory=8000, block=1000, ahead=False)
    store.fails = 1
    with pytest.raises(SourceError, match="broken"):
        read(blocks, 0, 10)
    assert read(blocks, 0, 10) == DATA[:10]
