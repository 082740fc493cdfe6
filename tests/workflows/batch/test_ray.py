"""A manifest on a Ray cluster of two nodes gives the bytes of one machine, also where a process is killed; see README.

Nodes are processes here, as Ray's own tests have them. Each has its workers, so a row and its shards are several.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from benchmarks.checkpoint import SMALL, make_checkpoint
from bridge.core.errors import UsageError
from bridge.workflows.batch.engines import make_engine
from bridge.workflows.batch.engines.ray import engine as engine_of_ray
from bridge.workflows.batch.engines.ray.engine import Ray, Settings
from bridge.workflows.batch.job import CRASH
from bridge.workflows.batch.values import BELOW, DONE, FAILED, Event, Job, Limits, Outcome, Row
from tests.faults.struck import contents

CONFIG = SMALL | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "vocab_size": 3000}
CONFIG |= {"num_attention_heads": 12, "rope_theta": 10000.0}
MEMORY = 400 << 20  # bytes that a row of the test's models takes
NODE = 1 << 30

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 million random weights: long enough in the making to be killed in the middle."""
    directory = tmp_path_factory.mktemp("model") / "model"
    make_checkpoint(directory, CONFIG, shards=3)
    return directory


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "memory": NODE, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def job(name: str, model: Path, out: Path, target: str = "hf", quant: str | None = None, **more: Any) -> Job:
    return Job(name, Row(name, name, str(model), target, str(out), quant, **more), MEMORY, 1)


def engine(address: str, workers: int = 2, **settings: Any) -> Ray:
    return make_engine("ray", Settings(address, **settings), Limits(workers))  # type: ignore[return-value]


def outcomes(engine: Ray, *jobs: Job, watch: Callable[[Event], None] = lambda event: None) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in engine.run(jobs, watch)}


def processes(title: str) -> list[int]:
    """Ids of Ray's processes that run a function: Ray writes its name where the command line was."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(f"ray::{title}".encode()):
                found.append(int(path.parent.name))
    return found


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Wait for something to become true."""
    until = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


class Killer(threading.Thread):
    """Kills processes that run the function `title`, as many as `times`, once `out` has begun to be written."""

    def __init__(self, title: str, out: Path, times: int = 1) -> None:
        super().__init__(daemon=True)
        self.title, self.times, self.journal = title, times, out.parent / f".{out.name}.partial/journal.jsonl"
        self.killed: set[int] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.times and not self.over.wait(0.003):
            with suppress(OSError):
                lines = self.journal.read_bytes().count(b"\n")
                for pid in [pid for pid in processes(self.title) if lines > 1 and pid not in self.killed][:1]:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


@slow
def test_a_manifest_gives_the_same_bytes_on_a_cluster_and_on_one_machine(
    address: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "batch.toml").write_text(f"""
        memory = "4GB"
        [ray]
        address = "{address}"
        [defaults]
        model = "{model}"
        out = "{{name}}"
        [[row]]
        name = "plain"
        target = "hf"
        [[row]]
        name = "blocks"
        target = "hf"
        quant = "fp8_block"
        shards = 2
        shard_size = 9000000
        [[row]]
        name = "items"
        target = "torchtitan"
        shards = 3
        [[row]]
        name = "int8"
        target = "trtllm"
        quant = "int8_wo"
        """)
    names = ("plain", "blocks", "items", "int8")
    local = bridge.batch(tmp_path / "batch.toml", engine="local")
    one = {name: contents(tmp_path / name) for name in names}
    assert {outcome.status for outcome in local.outcomes.values()} == {DONE}
    for name in names:
        (tmp_path / name).rename(tmp_path / f"{name}-local")
    cluster = bridge.batch(tmp_path / "batch.toml", engine="ray")
    assert {outcome.status for outcome in cluster.outcomes.values()} == {DONE}
    for name in names:
        assert contents(tmp_path / name) == one[name], name


@slow
def test_a_graph_is_made_while_others_write_its_weights(address: str, tmp_path: Path) -> None:
    tiny = Path(__file__).parents[3] / "examples/models/tiny-llama"
    bridge.convert(tiny, target="trt", quant="int8_wo", out=tmp_path / "one")
    told = outcomes(engine(address), job("graph", tiny, tmp_path / "several", "trt", "int8_wo", shards=2))
    assert told["graph"].status in (DONE, BELOW), told
    assert contents(tmp_path / "one") == contents(tmp_path / "several")


@slow
def test_a_row_whose_process_is_killed_in_the_middle_goes_on_to_the_same_bytes(
    address: str, model: Path, tmp_path: Path
) -> None:
    bridge.convert(model, target="hf", quant="int8_wo", out=tmp_path / "one")
    said: list[str] = []
    with Killer("run_here", tmp_path / "out") as killer:
        one = job("row", model, tmp_path / "out", quant="int8_wo")
        told = outcomes(engine(address), one, watch=lambda event: said.append(event.stage))
    assert len(killer.killed) == 1
    assert (told["row"].status, told["row"].attempts) == (DONE, 2)
    assert "again: its process died" in said
    assert contents(tmp_path / "one") == contents(tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


@slow
def test_a_shard_whose_process_is_killed_in_the_middle_is_written_again(
    address: str, model: Path, tmp_path: Path
) -> None:
    bridge.convert(model, target="hf", quant="int8_wo", out=tmp_path / "one")
    with Killer("write_partition", tmp_path / "out") as killer:
        told = outcomes(engine(address), job("row", model, tmp_path / "out", quant="int8_wo", shards=2))
    assert len(killer.killed) == 1
    assert (told["row"].status, told["row"].attempts) == (DONE, 1), told
    assert contents(tmp_path / "one") == contents(tmp_path / "out")


@slow
def test_a_row_that_dies_every_time_or_fails_in_our_words_harms_no_other(
    address: str, model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with Killer("run_here", tmp_path / "dies", times=2) as killer:
        told = outcomes(
            engine(address, workers=1, retries=1),
            replace(job("dies", model, tmp_path / "dies"), work=3),
            job("broken", broken, tmp_path / "never"),
            job("well", model, tmp_path / "well"),
        )
    assert len(killer.killed) == 2
    assert (told["dies"].status, told["dies"].kind, told["dies"].attempts) == (FAILED, CRASH, 2)
    assert (told["broken"].status, told["broken"].kind, told["broken"].attempts) == (FAILED, "SourceError", 1)
    assert told["well"].status == DONE
    assert not (tmp_path / "never").exists()


@slow
def test_a_row_that_hangs_is_killed_at_its_timeout_and_not_run_again(address: str, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # nobody writes into it
    hangs = job("hangs", model, tmp_path / "never", config=str(tmp_path / "config.json"))
    told = outcomes(engine(address), replace(hangs, timeout=2.0), job("well", model, tmp_path / "well"))
    assert told["well"].status == DONE
    assert (told["hangs"].status, told["hangs"].kind, told["hangs"].attempts) == (FAILED, "TimeoutError", 1)
    assert "took longer than its timeout of 2 s" in told["hangs"].error
    assert processes("run_here") == []


@slow
def test_a_spread_row_is_killed_at_its_timeout_with_its_shards(
    address: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row reads its config from a pipe. Its shards read it, too, and wait; only then does the clock run out."""
    pipe, said = tmp_path / "config.json", (model / "config.json").read_bytes()
    os.mkfifo(pipe)
    hung, over, hanging = threading.Event(), threading.Event(), set[int]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 10_000 * hung.is_set())
    monkeypatch.setattr(engine_of_ray, "time", clock)

    def answer() -> None:
        while not hung.is_set():
            with pipe.open("wb") as end:  # waits for who reads
                os.mkfifo(tmp_path / "next")
                (tmp_path / "next").rename(pipe)  # who reads next is not who reads now
                if not processes("write_partition"):
                    end.write(said)
                    continue
                within(60, lambda: len(processes("write_partition")) == 2)
                hanging.update(processes("write_partition"))
                hung.set()
                over.wait(120)

    threading.Thread(target=answer, daemon=True).start()
    try:
        row = job("hangs", model, tmp_path / "never", config=str(pipe), shards=2)
        with closing(engine(address).run([replace(row, timeout=9_000.0)], lambda event: None)) as ends:
            told = next(ends)  # the batch is still connected: at its end all of its processes end
            assert within(60, lambda: not processes("run_here") and not processes("write_partition"))
    finally:
        over.set()
    assert (told.status, told.kind, told.attempts) == (FAILED, "TimeoutError", 1)
    assert "took longer than its timeout of 9000 s" in told.error
    assert len(hanging) == 2 and not (tmp_path / "never").exists()


class Interrupt(BaseException):
    """Ctrl-C."""


@slow
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.product), 2])
def test_an_interrupt_ends_what_runs_and_shows_nothing_half_written(
    address: str, model: Path, tmp_path: Path, shards: int
) -> None:
    jobs = [job(f"row{n}", model, tmp_path / f"row{n}", quant="int8_wo", shards=shards) for n in range(6)]

    def watch(event: Event) -> None:
        if event.stage == "weights":
            raise Interrupt

    with pytest.raises(Interrupt):
        outcomes(engine(address), *jobs, watch=watch)
    visible = [path for path in tmp_path.iterdir() if not path.name.endswith(".partial")]  # kept, to go on from there
    for path in visible:
        assert (path / "bridge.json").exists() and (path / "report.json").exists(), path
    assert len(visible) < len(jobs)
    assert not processes("run_here") and not processes("write_partition")


KILLED = """
import sys
from bridge.workflows.batch.engines.ray.engine import Settings, make_engine
from bridge.workflows.batch.values import Job, Limits, Row

def rows():
    for n in range(40):
        yield Job(f"row{n}", Row(f"row{n}", "", sys.argv[1], "hf", f"{sys.argv[2]}/row{n}", "int8_wo"), 1 << 28, 1)

for outcome in make_engine(Settings(), Limits(1, 1 << 30)).run(list(rows()), lambda event: None):
    print(outcome.name, outcome.status, flush=True)
"""


@slow
def test_a_cluster_of_our_own_ends_with_its_batch_even_if_that_is_killed(model: Path, tmp_path: Path) -> None:
    batch = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert batch.stdout
    assert batch.stdout.readline() == "row0 done\n"
    pids = [pid for pid in children(batch.pid) if not AGENTS.intersection(title(pid).split())]
    assert any("raylet" in title(pid) for pid in pids)
    batch.kill()
    batch.wait()
    batch.stdout.close()
    until = time.monotonic() + 60
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # of a node: they look for it every minute, and end then


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from children(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@slow
def test_more_cpus_than_a_node_has_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="cpus = 2; the largest node of the cluster has 1"):
        engine(address, cpus=2)


@slow
def test_shards_that_no_node_has_room_for_are_refused_instead_of_waited_for(
    address: str, model: Path, tmp_path: Path
) -> None:
    one = job("row", model, tmp_path / "out", shards=2, memory=900 << 20)
    told = outcomes(engine(address), replace(one, memory=900 << 20))
    assert told["row"].kind == "UsageError"
    assert "no node has them" in told["row"].error
    assert not list(tmp_path.iterdir())


@slow
@pytest.mark.product  # tests/calibration/walk/test_workers.py has processes with the same environment
def test_tasks_share_a_calibration_and_get_the_bytes_of_one_process(address: str, tmp_path: Path) -> None:
    """Ray starts the processes; the environment that torchrun would give says who they are."""
    pytest.importorskip("modelopt.torch.quantization")
    import ray

    from tests.calibration.walk.test_workers import free_port

    asked: dict[str, Any] = {"quant": "fp8", "samples": 12, "sequence": 64, "progress": False}
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    model = str(Path("examples/models/tiny-llama").resolve())

    def calibrated(path: Path) -> bytes:
        return bridge.calibrate(model, **asked).save(path).read_bytes()

    ray.init(address, log_to_driver=False)
    try:
        tasks = [
            ray.remote(calibrated)
            .options(num_cpus=1, runtime_env={"env_vars": {**shared, "RANK": str(rank)}})
            .remote(tmp_path / str(rank))
            for rank in range(2)
        ]
        found = ray.get(tasks)
    finally:
        ray.shutdown()
    assert found == [calibrated(tmp_path / "alone")] * 2
