"""Measure on one machine what `benchmarks/scale.py` predicts: processes that share a conversion, and rows of a batch.

python -m benchmarks.scale_measured shared     0.1 B from a slow server, by 1, 2 and 4 processes, and predicted
python -m benchmarks.scale_measured rows       eight conversions of 0.1 B here, 1, 2 and 4 at once
python -m benchmarks.scale_measured constants  the rate of SHA-256 and the start of a task of Ray, which are assumed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bridge
from benchmarks.checkpoint import make_checkpoint
from benchmarks.scale import LATENCY, TASK, Cluster, predict
from benchmarks.speed import SHAPES
from bridge.api.conversion import RunOptions, run
from bridge.api.request import Request
from bridge.core.remote.blocks import BLOCK
from bridge.sources.opening import open_source
from bridge.streaming.context import ConversionContext, Partition, StepResult
from bridge.workflows.batch.engines.ray.rows import Offer, write_partition
from bridge.workflows.batch.values import Row


def shared(workers: Sequence[int], work: Path, rate: float) -> None:
    """Convert 0.1 B from a slow server by some processes on this machine: seconds of writing, and predicted.

    They are what Ray would start, without a cluster, and are measured from the first weight that one asks for: how long
    processes start depends on what else runs here.
    """
    source = open_source(_small(work))
    plan = bridge.plan(source, "hf", "fp8_pc_pt")
    for count in workers:
        cluster = Cluster("", 1, math.inf, count, network=math.inf, connection=rate)
        predicted = predict(plan, source, cluster, verify=False).stages["write"] - TASK
        with tempfile.TemporaryDirectory(dir=work) as folder, slow_server(_small(work), rate) as (address, asked):
            request = Request(address, "hf", "fp8_pc_pt", Path(folder) / "out", verify=False)
            run(request, RunOptions(executor=Processes(address, count)))
            seconds = max(path.stat().st_mtime for path in Path(folder).glob("out/*.safetensors")) - asked.value
        told = f"predicted {predicted:.1f} s ({predicted / seconds - 1:+.0%})"
        print(f"{count} workers: {seconds:.1f} s, {told}, load {os.getloadavg()[0]:.0f}", flush=True)


@dataclass(frozen=True)
class Processes:
    """Processes of one core that write partitions of a model: an `Executor`."""

    model: str
    processes: int

    def run(
        self, context: ConversionContext, partitions: Sequence[Partition], stop: threading.Event
    ) -> Iterator[Mapping[str, StepResult]]:
        offer = Offer(
            Row("", "", self.model, "", ""), context.source.fingerprint, context.plan, None, context.scheme,
            context.memory, 1, context.work.directory, context.work.identity, bridge.__version__,
        )  # fmt: skip
        with ProcessPoolExecutor(self.processes, get_context("spawn")) as pool:
            yield from pool.map(write_partition, [offer] * len(partitions), partitions)


def rows(workers: Sequence[int], work: Path) -> None:
    """Convert 0.1 B eight times, some at once: wall and processor seconds."""
    out = [{"name": f"row-{number}", "out": f"out/{number}"} for number in range(8)]
    every = [{"model": str(_small(work)), "target": "hf", "quant": "fp8_pc_pt", "verify": False} | row for row in out]
    for count in workers:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            manifest, before = _manifest(Path(folder), every), resource.getrusage(resource.RUSAGE_CHILDREN)
            begin = time.perf_counter()
            words = ["batch", str(manifest), "--workers", str(count), "--quiet"]
            subprocess.run([sys.executable, "-m", "bridge", *words], check=True)
            wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{count} at once: {wall:.1f} s, {processor:.1f} s of the processor, load {os.getloadavg()[0]:.0f}",
            flush=True,
        )


def constants() -> None:
    """What the prediction assumes of one core: the digest before an upload, and a task of Ray until it has imported."""
    import ray

    block = bytes(64 << 20)
    begin = time.perf_counter()
    hashlib.sha256(block)
    print(f"SHA-256: {len(block) / (time.perf_counter() - begin) / 1e9:.2f} GB/s")

    def imported() -> float:
        import bridge.workflows.batch.engines.ray.rows  # noqa: F401

        return time.time()

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    for _ in range(3):  # each in a new process
        start = time.time()
        print(f"a task: {ray.get(ray.remote(max_calls=1)(imported).remote()) - start:.2f} s")
    ray.shutdown()


def _small(work: Path) -> Path:
    model = work / "llama-0.1b"
    if not model.exists():
        make_checkpoint(model, SHAPES["0.1b"], 1)
    return model


def _manifest(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "\n".join(
        "\n".join(["[[row]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items())]) for row in rows
    )
    (folder / "batch.toml").write_text(text)
    return folder / "batch.toml"


@contextmanager
def slow_server(root: Path, rate: float) -> Iterator[tuple[str, Any]]:
    """A server, in a process of its own, that answers after `LATENCY` and sends `rate` bytes a second to each.

    With its address, the time when it was first asked for a block of weights.
    """
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    asked = spawn.Value("d", 0.0)
    process = spawn.Process(target=serve, args=(root, rate, theirs, asked), daemon=True)
    process.start()
    try:
        yield ours.recv(), asked
    finally:
        process.terminate()
        process.join()


def serve(root: Path, rate: float, port: Connection, asked_at: Any) -> None:
    """Serve until the process ends; the port goes through the connection."""

    class Slow(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            path = root / self.path.lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            total = path.stat().st_size
            begin, end = (int(asked[1]), min(int(asked[2]) + 1, total)) if asked else (0, total)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("ETag", '"one"')
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{total}")
            if end - begin == BLOCK and not asked_at.value:
                asked_at.value = time.time()
            time.sleep(LATENCY)
            self.end_headers()
            start, chunk = time.perf_counter(), 1 << 18
            with path.open("rb") as file:
                file.seek(begin)
                for at in range(0, end - begin, chunk):
                    with suppress(OSError):  # a block that was asked for in advance, and is not needed
                        self.wfile.write(file.read(min(chunk, end - begin - at)))
                    time.sleep(max(0.0, at / rate - (time.perf_counter() - start)))

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            """A process that has ended has closed its connections."""

    server = Quiet(("127.0.0.1", 0), Slow)
    port.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("shared", "rows", "constants"))
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second of each connection")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench-speed")
    args = parser.parse_args()
    if args.what == "rows":
        rows(args.workers, args.work)
    elif args.what == "constants":
        constants()
    else:
        shared(args.workers, args.work, args.rate)


if __name__ == "__main__":
    main()
