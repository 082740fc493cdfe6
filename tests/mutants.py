"""Break rows, roundings and checks one at a time and run the tests that must notice: `python -m tests.mutants`.

The mutants are data, `tests/mutants.toml`. Each is applied to a copy of the working tree, never to the tree itself, and
its tests run, one selector after the other, until one fails. A selector must first pass on the unbroken copy: what
fails anyway notices nothing. Exit status 1: one survived, a text was not there once, or a test failed unbroken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
MUTANTS = Path(__file__).with_suffix(".toml")
PASSED, FAILED, INTERRUPTED, NONE_SELECTED = 0, 1, 2, 5  # exit statuses of pytest; -9: it was stopped
# Imported once, for all runs: alone they take longer than most of the tests.
FRAMEWORKS = ["pytest", "hypothesis", "numpy", "numba", "torch", "transformers.modeling_utils", "safetensors.torch"]
FRAMEWORKS += ["onnxscript", "onnxruntime", "compressed_tensors"]
FRAMEWORKS += ["modelopt.torch.quantization", "modelopt.torch.export"]
FORKS = multiprocessing.get_context("forkserver")
NOTICED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
SOME_PASSED = re.compile(r"\b[1-9]\d* passed")


class Misfit(Exception):
    """A mutant, or a selector, does not fit the tree: it must be rewritten."""


@dataclass(frozen=True)
class Mutant:
    """One text instead of another in one file. `tests`: selectors of pytest, the most specific first.

    `survives`: no test notices it, for `reason`.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    survives: bool = False
    reason: str = ""

    def broken(self, root: Path) -> str:
        """The text of the file with the change; Misfit if there is not one place for it, or if nothing can read it."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if (count := text.count(self.before)) != 1:
            raise Misfit(f"{self.name}: `before` is {count} times in {self.file}, it must be there once")
        changed = text.replace(self.before, self.after)
        if changed == text:
            raise Misfit(f"{self.name}: `after` changes nothing")
        try:
            compile(changed, self.file, "exec") if path.suffix == ".py" else tomllib.loads(changed)
        except (SyntaxError, tomllib.TOMLDecodeError) as error:
            raise Misfit(f"{self.name}: {self.file} cannot be read, which every test notices: {error}") from error
        return changed


@dataclass(frozen=True)
class Ran:
    """One run of pytest."""

    status: int
    output: str
    seconds: float

    @property
    def test(self) -> str:
        """The first test that failed."""
        found = NOTICED.search(self.output)
        return found[1] if found else ""


@dataclass(frozen=True)
class Result:
    """One mutant is "caught", has "survived", or is an "error": its tests say nothing. `said`: the test, or why."""

    mutant: Mutant
    verdict: str
    said: str = ""
    seconds: float = 0.0

    @property
    def expected(self) -> bool:
        """Whether the list says so."""
        return self.verdict == ("survived" if self.mutant.survives else "caught")


def read_mutants() -> list[Mutant]:
    """Read the list; Misfit if a name is there twice, or if a survivor has no reason, or another one has."""
    found: dict[str, Mutant] = {}
    for entry in tomllib.loads(MUTANTS.read_text())["mutant"]:
        mutant = Mutant(**entry | {"tests": tuple(entry["tests"])})
        if mutant.name in found or not mutant.tests or mutant.survives != bool(mutant.reason):
            raise Misfit(f"{mutant.name}: needs a name of its own, tests, and a `reason` if and only if it survives")
        found[mutant.name] = mutant
    return list(found.values())


def check(mutants: Sequence[Mutant]) -> list[str]:
    """What of the list does not fit the tree."""
    problems = []
    for mutant in mutants:
        try:
            mutant.broken(ROOT)
        except Misfit as error:
            problems.append(str(error))
        for word in (word for selector in mutant.tests for word in shlex.split(selector) if word.startswith("tests/")):
            path, _, rest = word.partition("::")
            if not (ROOT / path).exists() or (
                rest and f"def {rest.partition('[')[0]}(" not in (ROOT / path).read_text()
            ):
                problems.append(f"{mutant.name}: {word} is not there")
        problems += [f"{mutant.name}: no test that is called {name}" for name in _missing(mutant)]
    return problems


def _missing(mutant: Mutant) -> list[str]:
    """Names of tests after -k that no file of their selector has."""
    found = []
    for words in map(shlex.split, mutant.tests):
        paths = [ROOT / word.partition("::")[0] for word in words if word.startswith("tests/")]
        texts = "".join(path.read_text() for path in paths if path.is_file())
        names = re.findall(r"\btest_\w+", " ".join(word for word in words if not word.startswith("tests/")))
        found += [name for name in names if texts and f"def {name}" not in texts]
    return found


class Copy:
    """A copy of the working tree: tracked files, and those that git does not ignore, as they are now."""

    def __init__(self, directory: Path, marker: str, timeout: float) -> None:
        self.root, self._marker, self._timeout = directory, marker, timeout
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/objects/*")]
        for name in filter(None, [*listed, *kernels]):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)

    @contextmanager
    def with_change(self, mutant: Mutant) -> Iterator[None]:
        """Break the copy while the block runs; then the file has its bytes and its time again."""
        path = self.root / mutant.file
        text, before, status = mutant.broken(self.root), path.read_bytes(), path.stat()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, selector: str, broken: bool) -> Ran:
        """Run pytest on a selector, in a process of its own, which is ended with all that it started."""
        words = ["-x", "-rfE", "-p", "no:cacheprovider", "-m", self._marker, *shlex.split(selector)]
        begin = time.monotonic()
        with tempfile.NamedTemporaryFile() as printed:
            process = FORKS.Process(target=_pytest, args=(self.root, words, printed.name, broken))
            process.start()
            try:
                process.join(self._timeout)
            finally:
                if process.is_alive():
                    os.killpg(process.pid, signal.SIGKILL)
                    process.join()
            output = Path(printed.name).read_text(errors="replace")
        return Ran(process.exitcode or 0, output, time.monotonic() - begin)


def _pytest(root: Path, words: list[str], printed: str, broken: bool) -> None:
    """In a fork of the process that has imported the frameworks: run pytest in a copy."""
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    if broken:  # a compiled file is known by whole seconds and its size, and a mutant may have the same
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    sys.argv = ["pytest", *words]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "bridge")]:
        del sys.modules[name]
    import pytest

    status = int(pytest.main(words))
    sys.stdout.flush()
    os._exit(status)  # without waiting for threads of what was tested


class Runner:
    """Runs mutants on copies, those of one first selector one after the other; remembers each unbroken run."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._unbroken: dict[str, Ran] = {}

    def run(self, mutants: Sequence[Mutant]) -> list[Result]:
        """Say of each mutant whether a test notices it."""
        copy, results = self._copies.get(), []
        for mutant in mutants:
            try:
                result = self._run(copy, mutant)
            except Misfit as error:
                result = Result(mutant, "error", str(error))
            results.append(result)
            said = result.said.partition("\n")[0]
            print(f"{result.verdict:9}{result.seconds:7.1f} s  {mutant.name}  {said}", flush=True)
        self._copies.put(copy)
        return results

    def _run(self, copy: Copy, mutant: Mutant) -> Result:
        seconds = 0.0
        for selector in mutant.tests:
            if not self._selects(copy, selector):
                continue
            with copy.with_change(mutant):
                ran = copy.run(selector, broken=True)
            seconds += ran.seconds
            if ran.status == FAILED or (ran.status == INTERRUPTED and ran.test):
                return Result(mutant, "caught", ran.test, seconds)
            if ran.status != PASSED:
                raise Misfit(f"{selector}: pytest ended with {ran.status}\n{ran.output[-2000:]}")
        if not seconds:
            raise Misfit("the marker leaves none of its tests")
        return Result(mutant, "survived", mutant.reason, seconds)

    def _selects(self, copy: Copy, selector: str) -> bool:
        """True if tests of the selector pass unbroken, False if the marker leaves none; Misfit if one fails."""
        if selector not in self._unbroken:
            ran = self._unbroken[selector] = copy.run(selector, broken=False)
            print(f"unbroken {ran.seconds:7.1f} s  {selector}", flush=True)
        ran = self._unbroken[selector]
        if ran.status == NONE_SELECTED:
            return False
        if ran.status != PASSED or not SOME_PASSED.search(ran.output):
            raise Misfit(f"{selector}: fails unbroken, pytest ended with {ran.status}\n{ran.output[-2000:]}")
        return True


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutant's name or a glob; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree; default: cores")
    parser.add_argument("--marker", default="not product", metavar="EXPR", help="pytest's -m; default: as `make test`")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one run; default: 600")
    parser.add_argument("--check", action="store_true", help="only find every text and every test; run nothing")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    wanted = [m for m in read_mutants() if any(fnmatchcase(m.name, glob) for glob in given.only or ["*"])]
    if problems := check(wanted) or ([] if wanted else [f"no mutant is called {' or '.join(given.only)}"]):
        print("\n".join(problems))
        return 1
    if given.check:
        print(f"{len(wanted)} mutants fit the tree")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    FORKS.set_forkserver_preload(FRAMEWORKS)
    groups: dict[str, list[Mutant]] = {}
    for mutant in wanted:
        groups.setdefault(mutant.tests[0], []).append(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(given.jobs) as pool:
        roots = [Path(directory) / str(number) for number in range(given.jobs)]
        runner = Runner([Copy(root, given.marker, given.timeout) for root in roots])
        results = [result for group in pool.map(runner.run, groups.values()) for result in group]
    verdicts = [result.verdict for result in results]
    told = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("caught", "survived", "error"))
    print(f"\n{len(results)} mutants: {told}")
    for result in (result for result in results if not result.expected):
        told = "is caught: it does not survive any more" if result.mutant.survives else result.said or result.verdict
        print(f"{result.mutant.name}: {told}")
    return 0 if all(result.expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
