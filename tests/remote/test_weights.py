"""The ways by which weights come from a server: the bytes of the file by each, and none fetched without need."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bridge
from bridge.errors import SourceError
from bridge.remote import blocks as blocks_module
from bridge.remote import weights as weights_module
from bridge.remote.blocks import BLOCK, Blocks
from bridge.remote.place import PAGE, PAGES
from bridge.remote.weights import LONGEST, OPEN, WeightReader
from bridge.sources import open_source
from tests.remote.server import serving
from tests.sources.foreign_checkpoints import llama, meta, nemo_archive, spelled

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
SIZE = 96 << 20
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
PIECE = 1 << 20


class Store:
    """One file, of which a block takes `seconds` of a clock that is not the machine's; notes what is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> None:
        self.flows: list[tuple[int, int]] = []
        self.fetched: list[tuple[int, int]] = []
        self.open, self.most = 0, 0
        self.fails = False
        self.now, self.seconds, self.asking = 0.0, seconds, 0.0  # for a block, and for a request of any size
        self.lock = threading.Lock()
        for module in (blocks_module, weights_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def weights(self, held: int = 64 << 20) -> WeightReader:
        blocks = Blocks(self.fetch, held)
        return WeightReader(self.flow, blocks, Blocks(self.fetch, PAGES, PAGE, connections=4, ahead=False))

    def take(self, begin: int, out: memoryview) -> None:
        out[:] = DATA[begin : begin + len(out)].data
        with self.lock:
            self.now += self.seconds * len(out) / BLOCK

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        self.fetched.append((begin, len(out)))
        self.now += self.asking
        self.take(begin, out)

    def flow(self, name: str, begin: int, end: int) -> _Flow:
        self.flows.append((begin, end))
        self.now += self.asking
        return _Flow(self, begin)


class _Flow:
    def __init__(self, store: Store, begin: int) -> None:
        self.at, self._store = begin, store
        store.open += 1
        store.most = max(store.most, store.open)

    def fill(self, out: memoryview) -> None:
        if self._store.fails:
            raise SourceError("broken")
        self._store.take(self.at, out)
        self.at += len(out)

    def close(self) -> None:
        self._store.open -= 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def read(weights: WeightReader, begin: int, end: int, tensor_end: int | None = None) -> None:
    """Read a tensor as a conversion does, a megabyte at a time, and compare it."""
    for at in range(begin, end, PIECE):
        out = np.empty(min(PIECE, end - at), np.uint8)
        weights.read("a", SIZE, at, tensor_end or end, out.data)
        assert np.array_equal(out, DATA[at : at + len(out)])


def test_tensors_that_are_read_in_turn_are_one_answer_each(store: Store) -> None:
    weights, cuts = store.weights(), [100, 5 << 20, 7 << 20, (50 << 20) + 1, SIZE]
    for begin, end in pairwise(cuts):
        read(weights, begin, end)
    assert store.flows == [
        (begin, min(begin + LONGEST, end)) for first, end in pairwise(cuts) for begin in range(first, end, LONGEST)
    ]
    assert store.fetched == [] and store.open == 0


def test_the_first_answer_is_short_for_it_has_to_tell_whether_one_connection_keeps_up(store: Store) -> None:
    read(store.weights(), 0, 20 << 20)
    assert store.flows == [(0, BLOCK), (BLOCK, 20 << 20)]


def test_small_tensors_cost_no_block(store: Store) -> None:
    weights = store.weights()
    read(weights, 0, BLOCK)
    for at in range(BLOCK + 10, BLOCK + 40_000, 4000):
        read(weights, at, at + 4000)
    assert len(store.flows) == 1 and store.fetched == [(BLOCK, PAGE)]


def test_where_one_connection_is_slow_blocks_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch, seconds=0.1)
    weights = store.weights()
    read(weights, 0, SIZE)
    assert store.flows == [(0, BLOCK)]
    assert sorted(store.fetched) == [(at, BLOCK) for at in range(BLOCK, SIZE, BLOCK)]


def test_a_connection_that_becomes_slow_is_left_after_its_answer(store: Store) -> None:
    weights = store.weights()
    read(weights, 0, 40 << 20)
    store.seconds = 0.3
    read(weights, 40 << 20, SIZE)
    assert store.flows[-1] == (40 << 20, 72 << 20)
    assert sorted(store.fetched) == [(at, BLOCK) for at in range(72 << 20, SIZE, BLOCK)]


def test_one_that_becomes_fast_is_read_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch, seconds=0.02)
    weights = store.weights()
    read(weights, 0, 40 << 20)
    store.seconds = 0.0001
    read(weights, 40 << 20, SIZE)
    assert len(store.flows) > 1 and store.flows[-1][1] == SIZE


def test_what_is_read_twice_is_fetched_twice_once_and_held_from_then_on(store: Store) -> None:
    weights = store.weights()
    for begin in range(0, 80 << 20, 20 << 20):
        for _ in range(2):
            read(weights, begin, begin + (20 << 20))
    assert store.flows == [(0, BLOCK), (BLOCK, 20 << 20)]
    assert len(set(store.fetched)) == len(store.fetched)


def test_what_could_not_have_been_held_is_read_straight_again(store: Store) -> None:
    weights = store.weights(held=32 << 20)
    for _ in range(2):
        read(weights, 0, 8 << 20)
        read(weights, 8 << 20, SIZE)
    assert store.flows[: len(store.flows) // 2] * 2 == store.flows and store.fetched == []


def test_readers_of_parts_of_one_tensor_have_an_answer_each(store: Store) -> None:
    weights, part = store.weights(), 12 << 20
    read(weights, 0, BLOCK)
    for at in range(0, part, PIECE):
        for first in range(BLOCK, SIZE - part, part):  # in turn, as threads do
            read(weights, first + at, first + at + PIECE, SIZE)
    parts = len(range(BLOCK, SIZE - part, part))
    assert len(store.flows) <= 1 + 2 * parts and store.fetched == []


def test_threads_that_read_pieces_of_one_tensor_get_what_they_ask_for(store: Store) -> None:
    weights = store.weights()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: read(weights, at, at + PIECE, SIZE), range(0, SIZE, PIECE)))
    assert store.open <= OPEN


@pytest.mark.parametrize("first", [100_000, 200_000, 1 << 20, 5 << 20])
def test_a_small_tensor_does_not_make_a_connection_look_slow(first: int, store: Store) -> None:
    store.seconds, store.asking = 0.004, 0.005  # 2 GB/s, and 5 ms a request
    weights = store.weights()
    read(weights, 0, first)
    read(weights, first, SIZE)
    assert sum(count for _, count in store.fetched) <= 2 * BLOCK


def test_what_never_came_was_not_read_before(store: Store) -> None:
    weights = store.weights()
    store.fails = True
    with pytest.raises(SourceError, match="broken"):
        read(weights, 0, BLOCK)
    store.fails = False
    read(weights, 0, SIZE)
    assert store.fetched == []


def test_a_read_beyond_what_was_announced_is_read_on(store: Store) -> None:
    out = np.empty(20 << 20, np.uint8)
    store.weights().read("a", SIZE, 0, 9 << 20, out.data)
    assert np.array_equal(out, DATA[: 20 << 20]) and store.fetched == [] and len(store.flows) <= 3


def test_rows_that_are_left_out_cost_their_answer_and_no_more_are_kept_open_than_a_few(store: Store) -> None:
    weights = store.weights()
    for at in range(0, SIZE - (2 << 20), 2 << 20):
        read(weights, at, at + 1000, at + (2 << 20))
    assert store.most <= OPEN + 1 and store.open <= OPEN
    weights.give_up()
    assert store.open == 0


def test_a_reader_that_failed_begins_anew(store: Store) -> None:
    weights = store.weights()
    read(weights, 0, PIECE, 6 << 20)
    store.fails = True
    with pytest.raises(SourceError, match="broken"):
        read(weights, PIECE, 2 << 20, 6 << 20)
    assert store.open == 0
    store.fails = False
    read(weights, PIECE, 6 << 20)
    assert store.flows == [(0, 6 << 20), (PIECE, 6 << 20)]


def test_a_store_without_answers_to_read_from_is_asked_for_blocks_ahead(store: Store) -> None:
    asked = list[int]()
    blocks, pages = Blocks(store.fetch, 64 << 20), Blocks(store.fetch, PAGES, PAGE)
    weights = WeightReader(lambda name, begin, end: asked.append(begin), blocks, pages)
    read(weights, 0, SIZE)
    assert asked == [0] and sorted(store.fetched) == [(at, BLOCK) for at in range(0, SIZE, BLOCK)]


def converted(model: str | Path, out: Path, scheme: str) -> dict[str, bytes]:
    bridge.convert(model, "hf", scheme, out)
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.mark.parametrize("scheme", ["fp8_pc_pt", "nvfp4_wo"])
def test_a_conversion_that_reads_straight_writes_the_bytes_of_a_local_one(
    scheme: str, straight: list[tuple[int, int]], tmp_path: Path
) -> None:
    with serving(TINY) as (url, _):
        far = converted(url, tmp_path / "far", scheme)
    assert far == converted(TINY, tmp_path / "near", scheme) != {}
    assert straight


def test_ranks_of_meta_are_read_straight(straight: list[tuple[int, int]], tmp_path: Path) -> None:
    hf = {name: t[:96] if t.shape[0] == 97 else t for name, t in llama().items()}
    meta(tmp_path / "m", spelled(hf, "meta"), 2, vocab_size=96)
    with serving(tmp_path / "m") as (url, _):
        source = open_source(url)
        assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())
    assert straight


def test_an_archive_of_nemo_is_read_straight(straight: list[tuple[int, int]], tmp_path: Path) -> None:
    hf = llama()
    archive = nemo_archive(tmp_path / "m", {"model_weights.ckpt": spelled(hf, "megatron")})
    with serving(tmp_path) as (url, _):
        source = open_source(f"{url}/{archive.name}", config={"vocab_size": 97})
        assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())
    assert straight


@pytest.mark.parametrize("drop_after", [70_000, 300_000])
def test_answers_that_break_are_gone_on_with(drop_after: int, straight: list[tuple[int, int]], tmp_path: Path) -> None:
    with serving(TINY, drop_after=drop_after, drop_at_least=1 << 17) as (url, _):
        far = converted(url, tmp_path / "far", "fp8_pc_pt")
    assert far == converted(TINY, tmp_path / "near", "fp8_pc_pt")
    assert straight


def test_a_file_that_changes_while_it_is_read_straight_is_an_error(
    straight: list[tuple[int, int]], tmp_path: Path
) -> None:
    with serving(TINY) as (url, manners):
        source = open_source(url)
        manners.tag = "2"
        with pytest.raises(SourceError, match="changed since it was opened"):
            source.read(next(iter(source.specs)))


def test_who_reads_straight_from_a_server_that_fell_silent_is_let_go(straight: list[tuple[int, int]]) -> None:
    with serving(TINY) as (url, manners):
        source = open_source(url)
        tree = source.root.tree  # type: ignore[attr-defined]
        manners.stall, manners.stall_at = 5.0, 1000
        threading.Timer(0.3, tree.give_up).start()
        begin = time.monotonic()
        with pytest.raises(SourceError, match="given up"):
            source.read("lm_head.weight")
        assert time.monotonic() - begin < 4
        manners.stall = 0.0
        tree.go_on()
        assert np.array_equal(source.read("lm_head.weight"), open_source(TINY).read("lm_head.weight"))


def test_an_answer_that_nobody_reads_on_once_reading_was_given_up_is_closed(straight: list[tuple[int, int]]) -> None:
    with serving(TINY) as (url, _):
        source = open_source(url)
        tree = source.root.tree  # type: ignore[attr-defined]
        source.read_rows("lm_head.weight", 0, 2)
        tree.store.give_up()
        with pytest.raises(SourceError, match="given up"):
            source.read_rows("lm_head.weight", 2, 4)
        assert not tree.store._client._connections._busy
        tree.go_on()
        near = open_source(TINY).read_rows("lm_head.weight", 2, 4)
        assert np.array_equal(source.read_rows("lm_head.weight", 2, 4), near)
