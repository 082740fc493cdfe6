"""A 2.2 GB Llama read from a local HTTP server by byte range, beside a plain client and curl; and converted from there.

    python benchmarks/remote.py --nginx nginx     five rounds, in turn, each a share of the plain client's rate

The server is nginx in a process of its own (sendfile, files in the page cache), which hands out bytes as fast as the
loopback takes them; with `--limit 100m` so many a second to each connection, as an object store does. `plain`: urllib3,
one connection, whole files in pieces of a megabyte. `read`: every tensor through `Source.read_rows`, a megabyte at a
time, on every core, as a conversion reads. curl: whole files to /dev/null.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import urllib3
from checkpoint import SMALL, make_checkpoint, run

from bridge.core.arrays import aligned_empty
from bridge.core.machine import cores
from bridge.planning.memory import PIECE
from bridge.sources.opening import open_source

ROOT = Path(__file__).parent.parent
CONVERT = (
    "import sys, bridge; bridge.convert(sys.argv[1], 'hf', 'fp8_pc_pt', sys.argv[2], overwrite=True, verify=False)"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-remote")
    parser.add_argument("--nginx", default=shutil.which("nginx"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", default="0", help="bytes a second of a connection, as nginx writes them: 100m")
    args = parser.parse_args()
    if not args.nginx:
        sys.exit("nginx is not installed; give --nginx PATH")
    checkpoint = args.work / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, SMALL)
    files = sorted(checkpoint.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    with served(args.nginx, checkpoint, args.limit) as url:
        addresses = [f"{url}/{file.name}" for file in files]
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: plain(addresses),
            "curl": lambda: curl(addresses),
            "read": lambda: read(url),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                if number:  # the first brings the files into the page cache
                    rates[name].append(total / (time.perf_counter() - start) / 1e9)
        for name, found in rates.items():
            share = statistics.median(rate / base for rate, base in zip(found, rates["plain"], strict=True))
            print(f"{name:8} median {statistics.median(found):5.2f} GB/s, {share:4.0%} of plain")
        seconds: dict[str, list[float]] = {"local": [], "remote": []}
        for _ in range(3):
            for name, model in (("local", str(checkpoint)), ("remote", url)):
                wall, _, anonymous = run([sys.executable, "-c", CONVERT, model, str(args.work / "converted")])
                seconds[name].append(wall)
                print(f"convert {name:7} {wall:5.2f} s, {anonymous:4.2f} GB of memory")
        print(
            f"convert: remote {statistics.median(seconds['remote']) / statistics.median(seconds['local']):.2f} of local"
        )


@contextmanager
def served(nginx: str, root: Path, limit: str = "0") -> Iterator[str]:
    """An nginx that serves a directory."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as scratch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = Path(scratch) / "nginx.conf"
        config.write_text(
            f"daemon off; master_process off; error_log {scratch}/error.log; pid {scratch}/pid; events {{}}\n"
            f"http {{ access_log off; sendfile on; keepalive_requests 100000; client_body_temp_path {scratch}/a;"
            f" proxy_temp_path {scratch}/b; fastcgi_temp_path {scratch}/c; uwsgi_temp_path {scratch}/d;"
            f" scgi_temp_path {scratch}/e; server {{ listen 127.0.0.1:{port}; root {root.resolve()};"
            f" limit_rate {limit}; }} }}\n"
        )
        server = subprocess.Popen([nginx, "-c", str(config), "-p", scratch], stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def plain(addresses: list[str]) -> None:
    pool = urllib3.PoolManager()
    for address in addresses:
        answer = pool.request("GET", address, preload_content=False)
        for _ in answer.stream(PIECE):
            pass
        answer.release_conn()


def curl(addresses: list[str]) -> None:
    outs = [word for _ in addresses for word in ("-o", "/dev/null")]
    subprocess.run(["curl", "-s", *outs, *addresses], check=True)


def read(url: str) -> None:
    source = open_source(url)
    names = iter(sorted(source.specs, key=source.place))

    def some() -> None:
        buffer = aligned_empty((PIECE,), np.uint8)
        for name in names:
            spec = source.specs[name]
            row = spec.nbytes // spec.shape[0]
            step = max(1, PIECE // row)
            for begin in range(0, spec.shape[0], step):
                end = min(begin + step, spec.shape[0])
                out = buffer[: (end - begin) * row].view(np.uint16).reshape(end - begin, *spec.shape[1:])
                source.read_rows(name, begin, end, out)

    with ThreadPoolExecutor(cores()) as pool:
        for done in [pool.submit(some) for _ in range(cores())]:
            done.result()


if __name__ == "__main__":
    main()
