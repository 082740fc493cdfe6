"""Models over HTTP: the bytes of a local conversion, only what is needed, and one clear error for what goes wrong."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import file_bytes
from bridge.core.remote.client import HEAD, Client
from bridge.core.remote.http import MAX_RANKS, HttpStore
from bridge.core.remote.path import MEMORY
from bridge.sources.opening import open_source
from tests.core.remote.server import Manners, serving
from tests.sources.foreign_checkpoints import llama, meta, nemo_archive, spelled

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in two files with an index."""
    root = tmp_path_factory.mktemp("served")
    source = open_source(TINY)
    names = sorted(source.specs)
    index = {}
    for number, file in enumerate(SHARDS):
        part = names[number * len(names) // 2 : (number + 1) * len(names) // 2]
        (root / file).write_bytes(file_bytes({name: source.read(name) for name in part}))
        index |= dict.fromkeys(part, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (root / name).write_bytes((TINY / name).read_bytes())
    (root / "video_preprocessor_config.json").write_text("{}")
    return root


@pytest.fixture
def served(sharded: Path) -> Iterator[tuple[str, Manners]]:
    with serving(sharded) as (url, manners):
        yield url, manners


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.mark.slow
def test_a_conversion_writes_the_bytes_of_a_local_one(
    served: tuple[str, Manners], sharded: Path, tmp_path: Path
) -> None:
    url, _ = served
    far = bridge.convert(url, "hf", "fp8_pc_pt", tmp_path / "far")
    near = bridge.convert(sharded, "hf", "fp8_pc_pt", tmp_path / "near")
    assert weights(tmp_path / "far") == weights(tmp_path / "near") != {}
    assert (tmp_path / "far/tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert far.passed and near.passed


def test_weights_are_fetched_once_though_they_are_read_twice_and_compared(
    served: tuple[str, Manners], sharded: Path, tmp_path: Path
) -> None:
    url, manners = served
    bridge.convert(url, "hf", "nvfp4_wo", tmp_path / "out")  # amax, then codes, then the comparison
    for name in SHARDS:
        assert manners.sent[name] <= (sharded / name).stat().st_size + HEAD


def test_a_plan_fetches_heads_only(served: tuple[str, Manners], sharded: Path) -> None:
    url, manners = served
    far, near = bridge.plan(url, "hf", "int8_wo"), bridge.plan(sharded, "hf", "int8_wo")
    assert far.steps == near.steps and far.side_files == near.side_files
    for name in SHARDS:
        assert manners.sent[name] == HEAD < (sharded / name).stat().st_size


def test_a_plan_counts_what_is_held_of_a_remote_model(served: tuple[str, Manners], sharded: Path) -> None:
    url, _ = served
    assert bridge.plan(url, "hf", "int8_wo").memory - bridge.plan(sharded, "hf", "int8_wo").memory == MEMORY


def test_an_address_of_one_file_of_weights_is_a_model(tmp_path: Path) -> None:
    with serving(TINY) as (url, _):
        source = open_source(f"{url}/model.safetensors")
    assert source.specs == open_source(TINY).specs


def test_the_tokenizer_is_loaded_from_there(served: tuple[str, Manners]) -> None:
    text = "once upon a time"
    assert open_source(served[0]).load_tokenizer()(text) == open_source(TINY).load_tokenizer()(text)


def test_an_archive_of_nemo_is_read_in_place(tmp_path: Path) -> None:
    hf = llama()
    archive = nemo_archive(tmp_path / "m", {"model_weights.ckpt": spelled(hf, "megatron")})
    with serving(tmp_path) as (url, _):
        source = open_source(f"{url}/{archive.name}", config={"vocab_size": 97})
        assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())


def test_ranks_of_meta_are_found_by_number(tmp_path: Path) -> None:
    hf = {name: t[:96] if t.shape[0] == 97 else t for name, t in llama().items()}
    meta(tmp_path / "m", spelled(hf, "meta"), 2, vocab_size=96)
    with serving(tmp_path / "m") as (url, _):
        source = open_source(url)
        assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())


def test_dropped_connections_are_resumed_from_the_byte_reached(served: tuple[str, Manners], sharded: Path) -> None:
    url, manners = served
    store = HttpStore(url)
    manners.drop_after, manners.drop_at_least, manners.ranges_asked = 1 << 20, 1 << 20, []
    out = bytearray(store.files[SHARDS[0]].nbytes)
    store.fetch(SHARDS[0], 0, memoryview(out))
    assert out == (sharded / SHARDS[0]).read_bytes()
    begins = [begin for _, begin, _ in manners.ranges_asked]
    assert begins == list(range(0, len(out), 1 << 20))


def test_a_server_that_is_busy_is_asked_again(served: tuple[str, Manners]) -> None:
    url, manners = served
    store = HttpStore(url, Client(pause=0.01))
    manners.fail = [503, 429, 500]
    store.fetch(SHARDS[0], 5, memoryview(bytearray(10)))
    assert not manners.fail


def test_connections_are_kept(served: tuple[str, Manners]) -> None:
    url, manners = served
    store = HttpStore(url)
    before = manners.connections
    for begin in range(20):
        store.fetch(SHARDS[0], begin, memoryview(bytearray(10)))
    assert manners.connections == before


def test_a_short_answer_follows_a_long_one_at_once(served: tuple[str, Manners], sharded: Path) -> None:
    url, _ = served
    store = HttpStore(url, Client(timeout=20.0))
    store.fetch(SHARDS[0], 0, memoryview(bytearray(3 << 20)))
    begin = time.monotonic()
    store.fetch(SHARDS[0], 0, memoryview(bytearray(10)))
    assert time.monotonic() - begin < 10


def test_a_server_that_falls_silent_in_the_middle_is_left_after_one_timeout(
    served: tuple[str, Manners], sharded: Path
) -> None:
    url, manners = served
    once, often, out = HttpStore(url, Client(timeout=1.0, tries=1)), HttpStore(url, Client(1.0)), bytearray(3 << 20)
    manners.stall, manners.stall_at = 5.0, 100_000
    begin = time.monotonic()
    with pytest.raises(SourceError, match="no answer in time, 1 times in a row"):
        once.fetch(SHARDS[0], 0, memoryview(out))
    assert time.monotonic() - begin < 1.8
    threading.Timer(0.5, lambda: setattr(manners, "stall", 0.0)).start()
    often.fetch(SHARDS[0], 0, memoryview(out))
    assert bytes(out) == (sharded / SHARDS[0]).read_bytes()[: 3 << 20]


def test_a_slow_answer_that_came_whole_is_taken(served: tuple[str, Manners], sharded: Path) -> None:
    url, manners = served
    store, out = HttpStore(url, Client(timeout=0.5, tries=1)), bytearray(900)
    manners.stall, manners.stall_at = 0.4, 450
    begin = time.monotonic()
    store.fetch(SHARDS[0], 0, memoryview(out))
    assert time.monotonic() - begin >= 0.4 and bytes(out) == (sharded / SHARDS[0]).read_bytes()[:900]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fail": [503] * 9}, "the server answers 503 Service Unavailable, 3 times in a row; check the network"),
        ({"tag": "2"}, "changed since it was opened; nothing was kept, run again"),
        ({"ranges": False}, "the server sends whole files only (no byte ranges)"),
        ({"status": {SHARDS[0]: 404}}, "gone (404), though it was there a moment ago; run again"),
        ({"status": {SHARDS[0]: 403}}, "access refused (403 Forbidden); give an address that may be read"),
        ({"status": {SHARDS[0]: 400}}, "the server answers 400 Bad Request; check the address"),
        ({"stall": 2.0}, "no answer in time, 3 times in a row"),
        ({"drip": 0.05}, "no answer in time, 3 times in a row"),
        ({"drop_after": -1}, "the connection ended after 0 of 100 bytes, 3 times in a row"),
        ({"headers_said": {"Content-Range": "bytes 0-99/²"}}, "the server does not say how long it is"),
    ],
)
def test_what_goes_wrong_is_one_clear_error(change: dict[str, object], said: str, served: tuple[str, Manners]) -> None:
    url, manners = served
    store = HttpStore(url, Client(timeout=0.2, tries=3, pause=0.01))
    for name, value in change.items():
        setattr(manners, name, value)
    with pytest.raises(SourceError) as caught:
        store.fetch(SHARDS[0], 0, memoryview(bytearray(100)))
    assert str(caught.value).startswith(f"{url}/{SHARDS[0]}: ") and said in str(caught.value)


def test_a_server_without_ranges_is_refused_before_any_weight_is_sent(sharded: Path) -> None:
    with serving(sharded, ranges=False) as (url, _), pytest.raises(SourceError, match="no byte ranges"):
        open_source(url)


def test_a_model_that_changes_is_an_error_where_it_is_read(served: tuple[str, Manners]) -> None:
    url, manners = served
    source = open_source(url)
    manners.tag = "2"
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("lm_head.weight")


@pytest.mark.parametrize("refused", [403, 401])
def test_weights_that_may_not_be_read_are_not_said_to_be_missing(refused: int, sharded: Path) -> None:
    names = dict.fromkeys(("model.safetensors", "model.safetensors.index.json", "params.json"), refused)
    with serving(sharded, status=names) as (url, _), pytest.raises(SourceError, match=rf"access refused \({refused} "):
        open_source(url)


def test_names_that_are_not_there_may_be_refused_where_others_are(sharded: Path) -> None:
    names = dict.fromkeys(("model.safetensors", "pytorch_model.bin", "params.json", "LICENSE"), 403)
    with serving(sharded, status=names) as (url, _):
        assert open_source(url).specs


@pytest.mark.parametrize("everywhere", [b"<html>not found</html>", b'{"dim": 8}'])
def test_a_server_that_answers_for_every_name_is_refused(everywhere: bytes, tmp_path: Path) -> None:
    with serving(tmp_path, answers_all=everywhere) as (url, manners), pytest.raises(SourceError, match=url):
        open_source(url)
    assert len(manners.headers) < 2 * MAX_RANKS


PAGE = b"\n<!DOCTYPE html>\n<html><body>not found</body></html>"


@pytest.mark.parametrize("page", [PAGE, b"<html>" + bytes(2 * HEAD)], ids=["short", "long"])
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("there", [(), ("config.json",), ("config.json", "model.safetensors")], ids=len)
def test_a_server_that_answers_with_a_page_is_told(
    there: tuple[str, ...], ranges: bool, page: bytes, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    with serving(tmp_path, answers_all=page, ranges=ranges) as (url, _):
        for address in (url, f"{url}/model.safetensors", f"{url}/m.nemo"):
            with pytest.raises(SourceError, match=r"(json|nemo): the server answers with a web page \(HTML\)"):
                open_source(address)


def test_a_page_without_a_length_is_a_page(tmp_path: Path) -> None:
    said = {"Content-Length": "", "Content-Type": "text/html; charset=utf-8", "Connection": "close"}
    told = pytest.raises(SourceError, match=r"config.json: the server answers with a web page \(HTML\)")
    with serving(tmp_path, answers_all=PAGE, ranges=False, headers_said=said) as (url, _), told:
        open_source(url)


def test_an_address_of_one_rank_of_meta_is_a_model(tmp_path: Path) -> None:
    hf = {name: t[:96] if t.shape[0] == 97 else t for name, t in llama().items()}
    meta(tmp_path / "m", spelled(hf, "meta"), 1, vocab_size=96)
    with serving(tmp_path / "m") as (url, _):
        assert open_source(f"{url}/consolidated.00.pth").specs == open_source(tmp_path / "m").specs


def test_a_manifest_takes_no_more_memory_than_its_text(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
    (tmp_path / "bridge.json").write_text('{"plan": {"steps": [' + ",".join(["[{}]"] * 400_000) + "]}}")
    with serving(tmp_path) as (url, _):
        tracemalloc.start()
        HttpStore(url)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 12e6  # parsed it takes 50 MB


def test_an_error_page_that_is_cut_is_still_an_answer(sharded: Path) -> None:
    with serving(sharded, cut_404=True) as (url, _):
        assert open_source(url).specs


def test_nothing_there_and_no_server_are_told(sharded: Path) -> None:
    with serving(sharded) as (url, _), pytest.raises(SourceError, match="none of the files of a model is there"):
        open_source(f"{url}/elsewhere")
    with pytest.raises(SourceError, match=r"no server nowhere\.invalid is known"):
        open_source("http://nowhere.invalid/m")
    with pytest.raises(SourceError, match=r"Connection refused.*, 2 times in a row"):
        HttpStore(url, Client(tries=2, pause=0.01))


@pytest.mark.slow
def test_passwords_and_signatures_are_used_and_never_shown(sharded: Path, tmp_path: Path) -> None:
    with serving(sharded, password="Basic bWU6c2VjcmV0", query="sig=veiled") as (url, manners):
        address = url.replace("http://", "http://me:secret@") + "?sig=veiled"
        source = open_source(address)
        bridge.convert(address, "hf", "fp8_pc_pt", tmp_path / "out")
        assert source.where == url
        written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
        assert b"secret" not in written and b"veiled" not in written
        manners.status = dict.fromkeys(SHARDS, 403)
        with pytest.raises(SourceError) as caught:
            open_source(address)
        assert "access refused (403" in str(caught.value)
        assert "secret" not in str(caught.value) and "veiled" not in str(caught.value)


def test_a_password_is_not_given_to_another_server(sharded: Path) -> None:
    with serving(sharded) as (there, seen), serving(sharded, onward=there) as (url, _):
        store = HttpStore(url.replace("http://", "http://me:secret@"))
        store.fetch(SHARDS[0], 0, memoryview(bytearray(10)))
        assert seen.headers and not any("Authorization" in headers for headers in seen.headers)
