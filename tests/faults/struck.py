"""Asks `tests.faults.server` for commands that a fault strikes; compares what they leave with an undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.reporting.page import render
from bridge.reporting.report import report_from_dict

ROOT = Path(__file__).parents[2]
TIMES = {"seconds": {}, "peak_memory": 0}  # of a report: all of it that two runs may differ in


@dataclass(frozen=True)
class Ended:
    """How a command ended. `calls`: how many of the counted ones it made, None where it was killed.

    `orphans`: processes that outlived it; `shared`: what it left in shared memory; `others`: how its copies ended.
    """

    code: int
    seconds: float
    said: str
    calls: int | None
    orphans: list[str]
    shared: list[str]
    others: list[tuple[int, str]]


class Server:
    """The process that has imported everything."""

    def __init__(self, shim: Path, cache: Path) -> None:
        env = {**os.environ, "LD_PRELOAD": str(shim), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.faults.server"]
        self._process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n"

    def warm(self, argv: list[str], place: Path) -> None:
        """Run it in the server itself, which then has loaded what it needs."""
        self._ask({"argv": argv, "place": str(place), "warm": True})

    def run(self, argv: list[str], place: Path, **fault: Any) -> Ended:
        """Run `qbridge ARGV` in `place`; `fault` is what `server` and `shim.c` understand."""
        place.mkdir(exist_ok=True)
        return Ended(**self._ask({"argv": argv, "place": str(place), **fault}))

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


def built(folder: Path) -> Path:
    """The shim, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests need a C compiler"
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def left(place: Path) -> list[str]:
    """Everything in the folder of a command, of its temporary files too."""
    return sorted(
        str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() or not any(path.iterdir())
        if path != place / "tmp"
    )  # fmt: skip


TRIAL = re.compile(r"tmp/[a-z0-9_]{8}")  # see tempfile._get_default_tempdir


def left_over(place: Path) -> list[str]:
    """What is neither the command's output, its manifest, nor the file with which Python tries a directory."""
    found = [name for name in left(place) if not name.startswith("out/") and name != "batch.toml"]
    return [name for name in found if not (TRIAL.fullmatch(name) and (place / name).read_bytes() in (b"", b"blat"))]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an output, as `timeless`."""
    return timeless({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})


def timeless(found: dict[str, bytes]) -> dict[str, bytes]:
    """Files of an output; a report without its times, and its page only if it is the page of that report."""
    for name in [name for name in found if name.endswith("report.json")]:
        report, page = report_from_dict(json.loads(found[name])), name.replace(".json", ".html")
        if found.get(page, b"").decode() == render(report):
            found[page] = b"the page of report.json"
        found[name] = dataclasses.replace(report, out="", **TIMES).to_json().encode()
    if "summary.json" in found:
        found["summary.json"] = _summary(found["summary.json"])
    return found


def _summary(content: bytes) -> bytes:
    """How the rows of a batch ended; what was kept of an earlier run took no time and no memory of this one."""
    rows = json.loads(content)["rows"]
    said = {
        row["name"]: [row.get(key) for key in ("status", "error", "bytes", "plan_digest", "cosine")] for row in rows
    }
    return json.dumps(said, sort_keys=True).encode()


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Names of the files in which two outputs differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def complaints(ended: Ended, code: int, words: str) -> list[str]:
    """What is wrong with how a command failed: it must say why in few lines, and call no bug what is none."""
    wrong = [f"ended with {ended.code}, not {code}"] if ended.code != code else []
    if words not in ended.said or "bug" in ended.said or len(ended.said.splitlines()) > 3:
        wrong.append(f"said {ended.said!r}")
    return wrong + ([f"still running: {ended.orphans}"] if ended.orphans else [])
