"""One process that attacks one target: `python -m tests.fuzz.worker headers 1000 7`; prints a line of JSON.

What fails is shrunk to a small case and kept, as a folder, where `--keep` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.fuzz.cage import Cage
from tests.fuzz.case import READ, Case, Target, attack, keep
from tests.fuzz.targets import target

ROUND = 500  # cases that Hypothesis is asked for at once: what it learns in a round is forgotten after it
SHOWN = 3000  # characters of a failure at its beginning and at its end: a message may be as long as a file
WARM = 40  # cases that run twice: held loosely, since they import and compile, and then as all others are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("cases", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "attack-found"))
    asked = parser.parse_args()
    into = asked.keep.absolute()
    started = time.monotonic()
    warnings.simplefilter("ignore")  # zipfile's, about the names that we write twice
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the disk takes longer than reading the case
    with tempfile.TemporaryDirectory(prefix="attack-", dir=memory) as work, tempfile.TemporaryDirectory() as own:
        set_hypothesis_home_dir(own)
        root = Path(work, "model")
        root.mkdir()
        aim = target(asked.target)
        aim.make(root)
        os.chdir(Path(work))
        counts, most, failures = run(aim, root, asked.cases, asked.seed, into)
        strangers = [path.name for path in Path(work).iterdir() if path != root]
        assert not strangers, f"written beside the model: {strangers}"
    said = {"target": asked.target, "cases": counts.total(), **counts, "peak": most, "failures": failures}
    print(json.dumps(said | {"seconds": round(time.monotonic() - started, 1)}))
    sys.exit(bool(failures))


def run(aim: Target, root: Path, cases: int, seed: int, into: Path) -> tuple[Counter[str], int, list[str]]:
    """Attack until `cases` have run or one fails; return what became of them, the most memory, and the failures."""
    assert attack(aim, root, {}, _Open()) == READ, "the valid artefact is not read"  # type: ignore[arg-type]
    counts: Counter[str] = Counter()
    last: list[Case] = []
    cage = Cage(loose=True)
    for number, size in _rounds(cases):
        test = _test(aim, root, cage, counts, last, size)
        try:
            hypothesis.seed(seed * 1_000_003 + number)(test)()
        except Exception as error:
            where = keep(root, last[0], into / aim.name)
            return counts, cage.most, [*_shown(error), f"{aim.name}: the last case is kept in {where}"]
        if cage.loose:
            cage.tighten()
            counts.clear()
        elif counts.total() >= cases:
            return counts, cage.most, []
    raise AssertionError("rounds do not end")


def _test(
    aim: Target, root: Path, cage: Cage, counts: Counter[str], last: list[Case], size: int
) -> Callable[[], object]:
    """A round: `size` cases, counted; the last one stays in `last`."""

    def one(case: Case) -> None:
        last[:] = [case]
        counts[attack(aim, root, case, cage)] += 1

    given = hypothesis.given(aim.cases(root))(one)
    return settings(
        max_examples=size, database=None, deadline=None, print_blob=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )(given)  # fmt: skip


def _rounds(cases: int) -> Iterator[tuple[int, int]]:
    """What decides the cases of a round, and how many they are: the first one comes twice, then as many as needed."""
    yield 0, min(WARM, cases)
    for number in itertools.count():
        yield number, min(ROUND if number else WARM, cases)


def _shown(error: BaseException) -> list[str]:
    """Every failure by its traceback, without the case that Hypothesis adds to it: it lies in a folder."""
    if isinstance(error, BaseExceptionGroup):
        return [text for inner in error.exceptions for text in _shown(inner)]
    error.__notes__ = []
    text = "".join(traceback.format_exception(error))
    return [text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n...\n{text[-SHOWN:]}"]


class _Open:
    """A cage that holds nobody."""

    most = 0

    def holds(self, size: int) -> _Open:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        return None


if __name__ == "__main__":
    main()
