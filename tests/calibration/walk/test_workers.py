"""Processes that share the batches of a calibration get the bytes of one process; an error of one ends all alike."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.calibrate import calibrate  # noqa: E402
from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.walk.workers.processes import LAUNCHED, Workers, joined, launched  # noqa: E402
from bridge.core.errors import CalibrationError, UsageError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests import forks, once  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

ROOT = Path(__file__).parents[3]
FAMILIES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel")
SCHEMES = (("fp8", "fp8"), ("int8_sq", None), ("int4_awq", "fp8"), ("w4a8_awq", None))
CELLS = [(FAMILIES[1], *SCHEMES[2]), (FAMILIES[2], *SCHEMES[1]), (FAMILIES[0], *SCHEMES[3])]
CASES = [
    "with_a_group", "alone", "one_batch", "other_data", "other_weights", "no_model", "nan", "a_bug", "a_loop",
    "converted", "converted_again", "resumed", "command_line", "command_that_fails",
]  # fmt: skip
Results = list[dict[str, Any]]


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def run_pair(root: Path, cases: Sequence[Any], size: int = 2, dying: Sequence[int] = ()) -> Results:
    """Run cases in processes as those of torchrun, and return what each gave, by rank; `dying`: those killed."""
    code = "import runpy; runpy.run_module('tests.calibration.walk.worker_process', run_name='__main__')"
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    environments = [{**shared, "RANK": str(rank)} for rank in range(size)]
    ended = forks.together(code, ROOT, 900, [str(root), json.dumps(cases)], environments)
    assert [code for code, _ in ended] == [-signal.SIGKILL if rank in dying else 0 for rank in range(size)], ended
    return [json.loads((root / f"results-{rank}.json").read_text()) for rank in range(size) if rank not in dying]


def only_in(at: int) -> int:
    """A token of one of the batches."""
    ids = [{*batch["input_ids"].reshape(-1).tolist()} for batch in batches(count=6)]
    return int(min(ids[at].difference(*ids[:at], *ids[at + 1 :])))


def make_models(root: Path) -> None:
    for family in FAMILIES:
        build(family, torch.float32).save_pretrained(root / family)
    other = build(FAMILIES[0], torch.float32)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(root / "other")
    broken = build(FAMILIES[0], torch.float32, tie_word_embeddings=False)
    with torch.no_grad():
        broken.model.embed_tokens.weight[only_in(4)] = float("inf")
    broken.save_pretrained(root / "broken")


@pytest.fixture(scope="module")
def root() -> Path:
    def make(path: Path) -> None:
        make_models(path)
        (path / "results.json").write_text(json.dumps(run_pair(path, [*CELLS, *CASES])))

    return once.directory("calibration of two workers", make)


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    made: Results = json.loads((root / "results.json").read_text())
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """As torchrun starts processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def at_once(model: Path, quant: str, kv: str | None, count: int = 6) -> str:
    """The digest of one process with the whole model."""
    with one_thread():
        source = open_source(model)
        structure = structure_of(source)
        scheme = load_scheme(quant, kv=kv).bound(structure.sites)
        return calibrate(CalibrationJob(source, structure, scheme, prepare(batches(count=count), source))).digest


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_two_workers_give_the_bytes_of_the_whole_model(cell: Any, root: Path, results: Results) -> None:
    digests = [theirs["-".join(map(str, cell))] for theirs in results]
    assert digests == [at_once(root / cell[0], *cell[1:])] * 2


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("size", [2, 3])
def test_every_cell_has_the_bytes_of_the_whole_model(size: int, tmp_path: Path) -> None:
    make_models(tmp_path)
    cells = [(family, *scheme) for family in FAMILIES for scheme in SCHEMES]
    results = run_pair(tmp_path, cells, size)
    for cell in cells:
        expected = at_once(tmp_path / cell[0], *cell[1:])
        assert [theirs["-".join(map(str, cell))] for theirs in results] == [expected] * size


@pytest.mark.slow
def test_the_callers_process_group_is_used_and_stays(root: Path, results: Results) -> None:
    assert [theirs["with_a_group"] for theirs in results] == [at_once(root / FAMILIES[2], "int8_sq", None)] * 2


@pytest.mark.slow
def test_one_process_of_a_group_may_calibrate_alone(root: Path, results: Results) -> None:
    assert [theirs["alone"] for theirs in results] == [at_once(root / FAMILIES[2], "int8_sq", None), ""]


@pytest.mark.slow
def test_a_worker_without_a_batch_gets_the_same(root: Path, results: Results) -> None:
    assert [theirs["one_batch"] for theirs in results] == [at_once(root / FAMILIES[2], "int8_sq", None, 2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("other_data", "UsageError", "worker 1 of 2 has another data than worker 0; give all of them all batches"),
        ("other_weights", "CalibrationError", "model.layers.1: worker 1 has other weights than worker 0"),
        ("no_model", "SourceError", "nowhere"),
        ("nan", "SourceError", "model.embed_tokens.weight: holds NaN or infinity"),
        ("a_loop", "CalibrationError", "a forward_loop runs the whole model"),
        ("converted_again", "WriteError", "exists already"),
    ],
)
def test_an_error_of_one_ends_all_and_is_told_once(case: str, kind: str, words: str, results: Results) -> None:
    (first, text, elsewhere), other = (theirs[case] for theirs in results)
    assert first == kind and words in text and not elsewhere
    assert other == [kind, text, True]


@pytest.mark.slow
def test_a_bug_in_one_ends_the_other_with_its_name(results: Results) -> None:
    first, other = (theirs["a_bug"] for theirs in results)
    assert first == ["ZeroDivisionError", "of rank 0", False]
    assert other == ["CalibrationError", "unexpected ZeroDivisionError: of rank 0", True]


@pytest.mark.slow
def test_one_worker_writes_and_both_have_its_report(root: Path, results: Results) -> None:
    first, other = (theirs["converted"] for theirs in results)
    assert first == other
    saved = bridge.Calibration.load(root / "converted" / "bridge" / "calibration.safetensors")
    assert saved.digest == at_once(root / FAMILIES[0], "fp8", "fp8")
    assert not [*root.glob(".converted*")]


@pytest.mark.slow
def test_workers_go_on_from_the_last_block_that_both_finished(root: Path, results: Results) -> None:
    assert [theirs["resumed"] for theirs in results] == [at_once(root / FAMILIES[0], "w4a8_awq", None)] * 2


@pytest.mark.slow
def test_the_command_of_rank_0_writes_and_prints(root: Path, results: Results) -> None:
    (code, out, err), other = (theirs["command_line"] for theirs in results)
    assert code == 0 and "written" in out and "of Python's documentation" in err
    assert other == [0, "", ""]
    with one_thread():
        expected = bridge.calibrate("examples/models/tiny-llama", "fp8", samples=8, sequence=32)
    assert (root / "of-command.safetensors").read_bytes() == expected.to_bytes()


@pytest.mark.slow
def test_the_command_of_rank_0_prints_the_error(results: Results) -> None:
    (code, out, err), other = (theirs["command_that_fails"] for theirs in results)
    assert code == 1 and not out and "CalibrationError: the embedded text: rows of 4000 tokens" in err
    assert other == [1, "", ""]


@pytest.mark.slow
@pytest.mark.product
def test_a_killed_worker_ends_the_other_and_both_go_on(tmp_path: Path) -> None:
    make_models(tmp_path)
    ((kind, text, _),) = (theirs["killed"] for theirs in run_pair(tmp_path, ["killed"], dying=[1]))
    assert kind == "CalibrationError" and "worker 0 of 2 lost another one, which was killed" in text
    assert len([*tmp_path.glob("beside*/block-*.safetensors")]) == 5  # rank 0 has kept one more
    expected = at_once(tmp_path / FAMILIES[0], "fp8", "fp8")
    assert [theirs["kept_beside"] for theirs in run_pair(tmp_path, ["kept_beside"])] == [expected] * 2
    assert not [*tmp_path.glob("beside*")]


@pytest.mark.slow
@pytest.mark.product
def test_torchrun_starts_the_command(tmp_path: Path) -> None:
    words = ["calibrate", "examples/models/tiny-llama", "--quant", "fp8", "--samples", "8", "--sequence", "32"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bridge"]
    subprocess.run([*torchrun, *words, "--out", str(tmp_path / "two.safetensors")], check=True)
    with one_thread():
        expected = bridge.calibrate("examples/models/tiny-llama", "fp8", samples=8, sequence=32)
    assert (tmp_path / "two.safetensors").read_bytes() == expected.to_bytes()


@pytest.mark.parametrize(("quant", "what"), [("int4_awq_clip", "awq_clip"), ("q4_0_imatrix", "an importance matrix")])
def test_what_cannot_be_joined_is_refused_before_the_model_is_loaded(
    quant: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(FAMILIES[0], torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    monkeypatch.setattr(type(source), "load_skeleton", lambda _: pytest.fail("the model was loaded"))
    structure = structure_of(source)
    scheme, data = load_scheme(quant).bound(structure.sites), prepare(batches(), source)
    with pytest.raises(CalibrationError, match=f"scheme {quant}.*{what}.*; calibrate in one process"):
        calibrate(CalibrationJob(source, structure, scheme, data, workers=Workers(0, 2, (), True)))


@pytest.mark.parametrize("count", [0, -1, "x", True, 1.0])
def test_a_number_of_workers_is_a_whole_number(count: Any) -> None:
    with pytest.raises(UsageError, match=rf"workers={count!r}: .* is a whole number, 1 or more"), joined(count):
        pytest.fail("entered")


def test_shares_follow_the_ranks_and_differ_by_one() -> None:
    for size in range(1, 5):
        for count in range(8):
            items = list(range(10, 10 + count))
            parts = [Workers(rank, size, (), True).share(items) for rank in range(size)]
            assert [pair for part in parts for pair in part] == [*enumerate(items)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert launched() == (0, 1)
    with joined() as workers:
        assert workers is None
    with pytest.raises(UsageError, match="workers=2, but 1 of this run; start as many with `torchrun"), joined(2):
        pass
