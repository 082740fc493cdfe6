"""A plan run in portions, by processes that join the run, gives the bytes of one process; each step runs once."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import opening
from bridge.container import read_header
from bridge.conversion import Conversion
from bridge.errors import SourceError, WriteError
from bridge.journal import JOURNAL
from bridge.making import Maker
from bridge.output import Work, output_directory
from bridge.portions import EACH, LEAST, Portion, cut
from bridge.quant.calibration import Calibration, Provenance
from bridge.stream import Streamed, run, run_portion
from tests.sources_made import CONFIG, MadeSource, made_llama

DOWN = "model.layers.1.mlp.down_proj"
FORMATS = [("hf", None, {}), ("hf", "nvfp4_wo", {"shard_size": 200_000}), ("trt", "fp8", {}), ("megatron", None, {})]


@dataclass
class Here:
    """A spread that runs its portions one after the other in this process; `most`: how many, before it is killed."""

    processes: int = 3
    most: int = 1 << 30
    ran: list[Portion] = field(default_factory=list)

    def run(
        self, conversion: Conversion, portions: Sequence[Portion], stop: threading.Event
    ) -> Iterator[Mapping[str, Mapping[str, Any]]]:
        for portion in portions:
            if len(self.ran) == self.most:
                raise Killed
            self.ran.append(portion)
            work = Work(conversion.work.directory, portion.done, io.StringIO(), conversion.work.identity)
            yield run_portion(replace(conversion, work=work, spread=None), work.directory, portion)


class Killed(BaseException):
    """Stands for a signal that nothing survives."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body is killed: nothing is cleaned up behind it."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("bridge.output._discard", lambda *args: None)
        yield


def conversion_of(source: MadeSource, target: str, quant: str | None, options: dict[str, Any]) -> Conversion:
    structure = opening.structure_of(source)
    scheme = opening.scheme_of(quant, None, structure)
    plan = opening.plan_of(source, structure, target, scheme, options)
    modules = [s.site.module for s in plan.quantized if s.site]
    calibration = Calibration(Provenance("", "", "", "", "", "", 0, 0), dict.fromkeys(modules, np.array(4, np.float32)))
    return Conversion(plan, source, calibration, scheme, 1 << 30, Work(Path(), {}, io.StringIO()))


def write(conversion: Conversion, out: Path, spread: Here | None) -> Streamed:
    with output_directory(out, conversion.plan.digest) as work:
        return run(replace(conversion, work=work, spread=spread), work.directory, threading.Event())


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def made() -> MadeSource:
    """With a matrix of zeros, of which there is something to tell."""
    config = CONFIG | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0}
    zeros = {f"{DOWN}.weight".replace(".", "__"): np.zeros((128, 384), np.float32)}
    return replace(made_llama("bfloat16", **zeros), config=config)


@pytest.mark.parametrize(("target", "quant", "options"), FORMATS)
@pytest.mark.parametrize("processes", [1, 3, 100])
def test_portions_give_the_bytes_of_one_process(
    target: str, quant: str | None, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    conversion = conversion_of(made(), target, quant, options)
    one = write(conversion, tmp_path / "one", None)
    several = write(conversion, tmp_path / "several", Here(processes))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "several")
    assert one == several
    assert bool(one.policies) == bool(quant)


def test_every_step_is_in_one_portion_and_groups_that_share_an_amax_stay_together(tmp_path: Path) -> None:
    conversion, spread = conversion_of(made(), "hf", "nvfp4_wo", {"shard_size": 200_000}), Here(100)
    write(conversion, tmp_path / "out", spread)
    names = [name for portion in spread.ran for name in portion.steps]
    assert sorted(names) == sorted("/".join(step.outputs[0].key) for step in conversion.plan.steps)
    assert len(set(names)) == len(names)
    groups: dict[str, set[int]] = {}
    for step in conversion.plan.steps:
        where = next(n for n, portion in enumerate(spread.ran) if "/".join(step.outputs[0].key) in portion.steps)
        groups.setdefault(step.shares or step.source, set()).add(where)
    assert any(step.shares for step in conversion.plan.steps)
    assert all(len(where) == 1 for where in groups.values())


def test_a_killed_run_goes_on_with_the_portions_that_were_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = conversion_of(made(), "hf", "fp8", {})
    write(conversion, tmp_path / "one", None)
    first, second = Here(8, most=3), Here(5)
    with killed(monkeypatch):
        write(conversion, tmp_path / "out", first)
    write(conversion, tmp_path / "out", second)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "out")
    written = {name for portion in first.ran for name in portion.steps}
    assert written
    assert not written & {name for portion in second.ran for name in portion.steps}


def test_a_run_that_was_killed_inside_a_group_keeps_what_was_done_and_the_amax_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = conversion_of(made(), "hf", "nvfp4_wo", {})
    group = [step for step in conversion.plan.steps if step.shares == conversion.plan.quantized[0].shares]
    assert len(group) > 1
    write(conversion, tmp_path / "one", None)
    told: list[str] = []
    made_by = Maker.make
    monkeypatch.setattr(
        Maker, "make", lambda self, step, *rest: (told.append(step.source), made_by(self, step, *rest))[1]
    )
    (only,) = conversion.plan.files
    data = bytearray((tmp_path / "one" / only).read_bytes())
    for name, (_, offset, nbytes) in read_header(tmp_path / "one" / only).entries.items():
        if name not in [output.spec.name for output in group[0].outputs]:
            data[offset : offset + nbytes] = bytes(nbytes)
    with killed(monkeypatch), output_directory(tmp_path / "out", conversion.plan.digest) as work:
        (work.directory / only).write_bytes(data)
        work.mark("/".join(group[0].outputs[0].key), {})
        raise Killed
    write(conversion, tmp_path / "out", Here(1))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "out")
    assert group[0].source not in told
    assert {step.source for step in group[1:]} <= set(told)


def test_a_process_that_was_given_up_writes_nothing_into_what_came_after(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    with output_directory(tmp_path / "out", "the run that came after") as work:
        mine = replace(conversion, work=work)
        run(mine, work.directory, threading.Event())
        before = bytes_of(work.directory)
        lost = replace(mine, work=Work(work.directory, {}, io.StringIO(), "the run that was given up"))
        portion = Portion(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
        with pytest.raises(WriteError, match="another run's"):
            run_portion(lost, work.directory, portion)
        assert bytes_of(work.directory) == before


def test_a_directory_that_a_node_does_not_see_is_told_of(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    portion = Portion(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
    with pytest.raises(WriteError, match="all nodes share"):
        run_portion(conversion, tmp_path / "not-there", portion)
    assert not list(tmp_path.iterdir())


def test_a_portion_makes_no_file_and_reserves_nothing(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    (tmp_path / JOURNAL).write_text('{"identity": ""}\n')
    portion = Portion(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
    with pytest.raises(FileNotFoundError):
        run_portion(conversion, tmp_path, portion)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_a_bad_weight_in_a_portion_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    source = made()
    source.arrays[f"{DOWN}.weight"].reshape(-1)[7] = 0x7F80  # infinity in bfloat16
    with pytest.raises(SourceError, match=DOWN):
        write(conversion_of(source, "hf", None, {}), tmp_path / "out", Here())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_portions_are_of_like_size_and_those_that_start_together_are_apart(processes: int) -> None:
    tasks = [((str(n),), LEAST // 3 + n) for n in range(300)]
    portions = cut(tasks, {}, processes)
    assert processes <= len(portions) <= processes * EACH + 1
    assert sorted(int(name) for portion in portions for name in portion.steps) == list(range(300))
    sizes = sorted(sum(tasks[int(name)][1] for name in portion.steps) for portion in portions)
    assert sizes[-1] <= 1.5 * sizes[len(sizes) // 2]
    if processes > 1:
        first = sorted(int(portion.steps[0]) for portion in portions[:processes])
        assert min(np.diff(first)) > 300 // len(portions)
