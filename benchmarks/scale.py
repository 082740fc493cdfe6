"""How long conversions of 70 B, 405 B and 1 T take on one node and on workers of Ray: on paper.

    python -m benchmarks.scale              the table of the page on performance
    python -m benchmarks.scale_measured     what can be measured of it on one machine

The plans are those of real shapes (headers over holes), cut into partitions by the function that cuts them for Ray;
each worker takes the next. As it is today, verification and upload are work of the one node that has the row. What a
partition costs comes from `mappings/speed.toml`; rates of networks and disks are those of `Cluster`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bridge
from bridge.core.remote.blocks import BLOCK, CONNECTIONS
from bridge.core.remote.objects import PART
from bridge.core.remote.path import MEMORY
from bridge.core.text import size
from bridge.planning.estimate import DISK, PROCESSOR, SOURCE, START, Machine, read_speeds, spent, stage_waits, work_of
from bridge.planning.plan import Plan
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.streaming.run import Tasks, cut
from tests.models.sparse_checkpoint import DEEPSEEK_V3, LLAMA_405B, deepseek_specs, llama_specs, write_sparse

LLAMA_70B = LLAMA_405B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {  # moonshotai/Kimi-K2: 1.03 T
    "n_routed_experts": 384, "first_k_dense_replace": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
    "vocab_size": 163840, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS = (
    ("70 B", LLAMA_70B, llama_specs), ("405 B", LLAMA_405B, llama_specs), ("1 T", KIMI_K2, deepseek_specs),
)  # fmt: skip
LATENCY = 0.1  # seconds of an S3 request: "roughly 100-200 milliseconds" (Amazon S3, optimizing performance)
CONNECTION = 85e6  # bytes a second of one connection to S3, of the 50 to 100 MB/s that `core.remote.blocks` counts with
AHEAD = min(CONNECTIONS, MEMORY // BLOCK // 4)  # blocks after the one that a thread reads
UPLOADS = 12  # parts that obstore sends at once
# Both by `python -m benchmarks.scale_measured constants`.
HASHED = 1.4e9  # bytes a second of the SHA-256 that is taken of a file before it is sent, on one core
TASK = 1.5  # seconds from a call of Ray to its first byte: a process starts and imports
OPENED = 5e-5  # seconds a tensor: a call opens the model and unpickles the plan; of a Llama of 400 layers
UPLOAD, SHARED = "the upload", "the shared file system"


@dataclass(frozen=True)
class Cluster:
    """Nodes that convert one model. `workers`: processes of Ray, 0 without it. Rates are bytes a second.

    `cores`: of a node, and of a worker. `network`: of a node. `disk`: what a node writes to and reads its output from,
    or what all workers share. `latency`: of a request, 0 if the source lies on `disk`. `connection`: of one connection.
    """

    name: str
    cores: int
    disk: float
    workers: int = 0
    network: float = 1.56e9  # 12.5 Gb/s, what small nodes of clouds have
    latency: float = LATENCY
    connection: float = CONNECTION
    remote: bool = True

    def reading(self, nbytes: int) -> float:
        """Seconds in which one process reads so much of a remote source: its threads ask for blocks in advance."""
        requests = min(CONNECTIONS, self.cores * (1 + AHEAD))
        return self._moving(nbytes, BLOCK, requests)

    def sending(self, nbytes: int) -> float:
        """Seconds in which one process takes the digest of so many bytes and uploads them."""
        return nbytes / HASHED + self._moving(nbytes, PART, UPLOADS)

    def _moving(self, nbytes: int, part: int, requests: int) -> float:
        turns = math.ceil(nbytes / part / requests)
        return max(turns * (self.latency + part / self.connection), nbytes / self.network)


CLUSTERS = (
    Cluster("one node, 16 cores, NVMe (3 GB/s)", 16, 3e9, remote=False),
    Cluster("one node, 16 cores, network disk (1 GB/s)", 16, 1e9, remote=False),
    Cluster("one node, 16 cores, NVMe, S3 to S3", 16, 3e9),
    Cluster("8 workers of 8 cores, S3 to S3", 8, 2e9, 8),
    Cluster("64 workers of 8 cores, S3 to S3", 8, 2e9, 64),
)


@dataclass(frozen=True)
class Prediction:
    """Seconds of each stage, and of what it waits for most."""

    stages: dict[str, float]
    bounds: dict[str, str]

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def bound(self) -> str:
        """The longest stage, and what it waits for."""
        stage = max(self.stages, key=lambda name: self.stages[name])
        return f"{stage}: {self.bounds[stage]}"

    def shared(self, workers: int) -> float:
        """Seconds if workers verified and sent what they write, which they do not."""
        return sum(
            seconds / (workers if stage in ("verify", "upload") else 1) for stage, seconds in self.stages.items()
        )


def predict(plan: Plan, source: Source, cluster: Cluster, *, verify: bool = True) -> Prediction:
    """One conversion on a cluster, from its plan and where the source's tensors lie."""
    speeds, work = read_speeds(), work_of(plan)
    rate = work.read / cluster.reading(work.read) if cluster.remote else cluster.disk
    node = Machine(cluster.cores, source=rate, disk=cluster.disk)
    stages = {"start": spent(speeds.start, work)}
    bounds = {"start": START}
    if cluster.workers:
        stages["write"], bounds["write"] = spread(plan, source, cluster)
    else:
        waits = _apart(stage_waits("write", speeds.write, work, node, fits=False), cluster)
        stages["write"], bounds["write"] = max((seconds, name) for name, seconds in waits.items())
    if verify:
        waits = _apart(stage_waits("verify", speeds.verify, work, node, fits=False), cluster)
        stages["verify"], bounds["verify"] = max((seconds, name) for name, seconds in waits.items())
    if cluster.remote:
        stages["upload"], bounds["upload"] = cluster.sending(work.written), UPLOAD
    return Prediction(stages, bounds)


def _apart(waits: dict[str, float], cluster: Cluster) -> dict[str, float]:
    """A source on the same disk as the output: their bytes wait for each other."""
    return waits if cluster.remote else {**waits, SOURCE: 0.0, DISK: waits[SOURCE] + waits[DISK]}


def spread(plan: Plan, source: Source, cluster: Cluster) -> tuple[float, str]:
    """Seconds until the last worker has written its last partition, and what most of its time went to."""
    speeds, number = read_speeds(), {id(step): str(at) for at, step in enumerate(plan.steps)}
    tasks = list(Tasks(plan.steps, source))
    sizes = [(tuple(number[id(step)] for step in task), sum(step.nbytes for step in task)) for task in tasks]
    stream = {name: value for name, value in speeds.write.items() if name != "once"}
    waiting, waited = list[Part](), dict.fromkeys((START, PROCESSOR, SOURCE), 0.0)
    for count, partition in enumerate(cut(sizes, {}, cluster.workers)):
        work = work_of(replace(plan, steps=tuple(plan.steps[int(key)] for key in partition.steps)))
        worker = Machine(cluster.cores, source=work.read / max(cluster.reading(work.read), 1e-9))
        waits = stage_waits("write", stream, work, worker, fits=False)
        begin = OPENED * len(plan.outputs) + (TASK if count < cluster.workers else 0.0)
        waiting.append(Part(begin + max(waits.values()), work.written))
        for name, seconds in {START: begin, PROCESSOR: waits[PROCESSOR], SOURCE: waits[SOURCE]}.items():
            waited[name] += seconds
    waited[SHARED] = sum(part.written for part in waiting) / cluster.disk * cluster.workers
    return simulate(waiting, cluster.workers, cluster.disk), max(waited, key=lambda name: waited[name])


@dataclass
class Part:
    """A partition: seconds that it takes alone, the bytes that it writes, and the share of it that is left."""

    seconds: float
    written: int
    left: float = 1.0

    def rate(self, disk: float) -> float:
        """The share of it that is done in a second if it gets so many bytes a second of the disk."""
        return min(1 / self.seconds, disk / self.written if self.written else math.inf)


def simulate(waiting: Sequence[Part], workers: int, disk: float) -> float:
    """Seconds in which workers do all partitions, each the next one; those that write share the disk's rate."""
    queue, running, now = deque(waiting), list[Part](), 0.0
    while queue or running:
        while queue and len(running) < workers:
            running.append(queue.popleft())
        rates, rest = list[float](), disk
        # who needs least of the disk gets that, and leaves the others more
        running.sort(key=lambda part: part.written / part.seconds)
        for number, part in enumerate(running):
            rates.append(part.rate(rest / (len(running) - number)))
            rest -= rates[-1] * part.written
        passed = min(part.left / rate for part, rate in zip(running, rates, strict=True))
        for part, rate in zip(running, rates, strict=True):
            part.left -= passed * rate
        running = [part for part in running if part.left > 1e-9]
        now += passed
    return now


def plans(scheme: str, only: Sequence[str]) -> list[tuple[str, Plan, Source]]:
    """The plans of the shapes, from headers over holes."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config, specs in MODELS:
            if not only or name.replace(" ", "") in only:
                root = write_sparse(Path(folder) / name, config, specs(config))
                source = open_source(root)
                made.append((name, bridge.plan(source, "hf", scheme), source))
    return made


def table(scheme: str, only: Sequence[str]) -> str:
    """The rows of the page on performance."""
    head = (
        "model, tensors, read, written",
        "where",
        "write",
        "verify",
        "upload",
        "in all",
        "bound",
        "if workers shared it",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, plan, source in plans(scheme, only):
        work = work_of(plan)
        what = f"{name}, {work.tensors:,}, {size(work.read)}, {size(work.written)}"
        for cluster in CLUSTERS:
            found = predict(plan, source, cluster)
            apart = short(found.shared(cluster.workers)) if cluster.workers else ""
            cells = [short(found.stages.get(stage, 0.0)) for stage in ("write", "verify", "upload")]
            lines.append(f"| {' | '.join([what, cluster.name, *cells, short(found.seconds), found.bound, apart])} |")
            what = ""
    return "\n".join(lines)


def short(seconds: float) -> str:
    """Seconds as the table has them."""
    return "" if not seconds else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheme", default="fp8_pc_pt")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    print(table(args.scheme, args.only))


if __name__ == "__main__":
    main()
