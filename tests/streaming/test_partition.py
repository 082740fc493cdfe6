"""A plan run in partitions, by processes that join the run, gives the bytes of one process; each step runs once."""

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

from bridge.api import plans as opening
from bridge.core.errors import SourceError, WriteError
from bridge.core.formats.safetensors import read_header
from bridge.core.output.directory import Work, output_directory
from bridge.core.output.names import JOURNAL
from bridge.quant.calibration import Calibration, Provenance
from bridge.streaming import run as streaming_run
from bridge.streaming.context import ConversionContext, Partition, StepResult
from bridge.streaming.run import MAX_PARTITIONS, MIN_PARTITION, Summary, cut, run, run_partition
from bridge.targets import file_settings
from tests.models.sources_made import CONFIG, MadeSource, made_llama

DOWN = "model.layers.1.mlp.down_proj"
FORMATS = [("hf", None, {}), ("hf", "nvfp4_wo", {"shard_size": 200_000}), ("trt", "fp8", {}), ("megatron", None, {})]


@dataclass
class Here:
    """An executor that runs its partitions one by one in this process; `most`: how many, then it is killed."""

    processes: int = 3
    most: int = 1 << 30
    ran: list[Partition] = field(default_factory=list)

    def run(
        self, context: ConversionContext, partitions: Sequence[Partition], stop: threading.Event
    ) -> Iterator[Mapping[str, StepResult]]:
        for partition in partitions:
            if len(self.ran) == self.most:
                raise Killed
            self.ran.append(partition)
            work = Work(context.work.directory, partition.done, io.StringIO(), context.work.identity)
            yield run_partition(replace(context, work=work, executor=None), work.directory, partition)


class Killed(BaseException):
    """Stands for a signal that nothing survives."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body is killed: nothing is cleaned up behind it."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("bridge.core.output.directory._discard", lambda *args: None)
        yield


def conversion_of(source: MadeSource, target: str, quant: str | None, options: dict[str, Any]) -> ConversionContext:
    structure = opening.structure_of(source)
    scheme = opening.scheme_of(quant, None, structure, source)
    plan = opening.plan_of(source, structure, target, scheme, options)
    modules = [s.site.module for s in plan.quantized if s.site]
    calibration = Calibration(Provenance("", "", "", "", "", "", 0, 0), dict.fromkeys(modules, np.array(4, np.float32)))
    return ConversionContext(
        plan, source, calibration, scheme, 1 << 30, Work(Path(), {}, io.StringIO()), file_settings(plan, source)
    )


def write(conversion: ConversionContext, out: Path, executor: Here | None) -> Summary:
    with output_directory(out, conversion.plan.digest) as work:
        return run(replace(conversion, work=work, executor=executor), work.directory, threading.Event())


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def made() -> MadeSource:
    """With a matrix of zeros, of which there is something to tell."""
    config = CONFIG | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0}
    zeros = {f"{DOWN}.weight".replace(".", "__"): np.zeros((128, 384), np.float32)}
    return replace(made_llama("bfloat16", **zeros), config=config)


@pytest.mark.parametrize(("target", "quant", "options"), FORMATS)
@pytest.mark.parametrize("processes", [1, 3, 100])
def test_partitions_give_the_bytes_of_one_process(
    target: str, quant: str | None, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    conversion = conversion_of(made(), target, quant, options)
    one = write(conversion, tmp_path / "one", None)
    several = write(conversion, tmp_path / "several", Here(processes))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "several")
    assert one == several
    assert bool(one.policies) == bool(quant)


def test_every_step_is_in_one_partition_and_groups_that_share_an_amax_stay_together(tmp_path: Path) -> None:
    conversion, executor = conversion_of(made(), "hf", "nvfp4_wo", {"shard_size": 200_000}), Here(100)
    write(conversion, tmp_path / "out", executor)
    names = [name for partition in executor.ran for name in partition.steps]
    assert sorted(names) == sorted("/".join(step.outputs[0].key) for step in conversion.plan.steps)
    assert len(set(names)) == len(names)
    groups: dict[str, set[int]] = {}
    for step in conversion.plan.steps:
        where = next(n for n, partition in enumerate(executor.ran) if "/".join(step.outputs[0].key) in partition.steps)
        groups.setdefault(step.shares or step.source, set()).add(where)
    assert any(step.shares for step in conversion.plan.steps)
    assert all(len(where) == 1 for where in groups.values())


def test_a_killed_run_goes_on_with_the_partitions_that_were_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = conversion_of(made(), "hf", "fp8", {})
    write(conversion, tmp_path / "one", None)
    first, second = Here(8, most=3), Here(5)
    with killed(monkeypatch):
        write(conversion, tmp_path / "out", first)
    write(conversion, tmp_path / "out", second)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "out")
    written = {name for partition in first.ran for name in partition.steps}
    assert written
    assert not written & {name for partition in second.ran for name in partition.steps}


def test_a_run_that_was_killed_inside_a_group_keeps_what_was_done_and_the_amax_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = conversion_of(made(), "hf", "nvfp4_wo", {})
    group = [step for step in conversion.plan.steps if step.shares == conversion.plan.quantized[0].shares]
    assert len(group) > 1
    write(conversion, tmp_path / "one", None)
    written: list[str] = []
    write_step = streaming_run.write_step
    monkeypatch.setattr(
        streaming_run, "write_step", lambda step, *rest: (written.append(step.source), write_step(step, *rest))[1]
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
    assert group[0].source not in written
    assert {step.source for step in group[1:]} <= set(written)


def test_a_process_that_was_given_up_writes_nothing_into_what_came_after(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    with output_directory(tmp_path / "out", "the run that came after") as work:
        mine = replace(conversion, work=work)
        run(mine, work.directory, threading.Event())
        before = bytes_of(work.directory)
        lost = replace(mine, work=Work(work.directory, {}, io.StringIO(), "the run that was given up"))
        partition = Partition(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
        with pytest.raises(WriteError, match="another run has taken over"):
            run_partition(lost, work.directory, partition)
        assert bytes_of(work.directory) == before


def test_a_directory_that_a_node_does_not_see_is_told_of(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    partition = Partition(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
    with pytest.raises(WriteError, match="all nodes share"):
        run_partition(conversion, tmp_path / "not-there", partition)
    assert not list(tmp_path.iterdir())


def test_a_partition_makes_no_file_and_reserves_nothing(tmp_path: Path) -> None:
    conversion = conversion_of(made(), "hf", None, {})
    (tmp_path / JOURNAL).write_text('{"identity": ""}\n')
    partition = Partition(("/".join(conversion.plan.steps[0].outputs[0].key),), {})
    with pytest.raises(FileNotFoundError):
        run_partition(conversion, tmp_path, partition)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_a_bad_weight_in_a_partition_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    source = made()
    source.arrays[f"{DOWN}.weight"].reshape(-1)[7] = 0x7F80  # infinity in bfloat16
    with pytest.raises(SourceError, match=DOWN):
        write(conversion_of(source, "hf", None, {}), tmp_path / "out", Here())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_partitions_are_of_like_size_and_those_that_start_together_are_apart(processes: int) -> None:
    tasks = [((str(n),), MIN_PARTITION // 3 + n) for n in range(300)]
    partitions = cut(tasks, {}, processes)
    assert processes <= len(partitions) <= processes * MAX_PARTITIONS + 1
    assert sorted(int(name) for partition in partitions for name in partition.steps) == list(range(300))
    sizes = sorted(sum(tasks[int(name)][1] for name in partition.steps) for partition in partitions)
    assert sizes[-1] <= 1.5 * sizes[len(sizes) // 2]
    if processes > 1:
        first = sorted(int(partition.steps[0]) for partition in partitions[:processes])
        assert min(np.diff(first)) > 300 // len(partitions)
