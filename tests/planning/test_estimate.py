"""How long a conversion takes is told from its plan: what it does, at speeds that were measured, and what limits it."""

from __future__ import annotations

import json
import math
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bridge
from benchmarks import speed
from bridge.core import machine as machines
from bridge.core.dtypes import SEARCHED
from bridge.core.errors import UsageError
from bridge.core.machine import cached_share
from bridge.planning import estimate as estimates
from bridge.planning.estimate import (
    DISK,
    PROCESSOR,
    SOURCE,
    START,
    Machine,
    Work,
    estimate,
    operation_of,
    read_speeds,
    work_of,
)
from bridge.planning.plan import Plan
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from tests.models.sources_made import made_llama
from tests.work import counted

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
QUICK = Machine(cores=2)  # reads and writes in no time


@pytest.fixture(scope="module")
def plan() -> Plan:
    return bridge.plan(TINY, "hf", "nvfp4_wo")


def large(plan: Plan, times: int) -> Plan:
    """A plan whose matrices have so many times the rows."""
    sources = {
        name: replace(spec, shape=(spec.shape[0] * times, *spec.shape[1:])) for name, spec in plan.sources.items()
    }

    def grown(step: Any) -> Any:
        outputs = (
            replace(
                o, spec=replace(o.spec, shape=(o.spec.shape[0] * times, *o.spec.shape[1:])) if o.spec.shape else o.spec
            )
            for o in step.outputs
        )
        return replace(step, outputs=tuple(outputs))

    return replace(plan, sources=sources, steps=tuple(map(grown, plan.steps)))


def test_every_value_is_counted_in_one_operation(plan: Plan) -> None:
    work = work_of(plan)
    quantized = sum(plan.sources[step.source].size for step in plan.quantized)
    assert work.values["fp4 block 16 e4m3"] == quantized
    assert sum(work.values.values()) == sum(spec.size for spec in plan.sources.values())
    assert (work.read, work.written) == (
        sum(spec.nbytes for spec in plan.sources.values()),
        sum(output.spec.nbytes for output in plan.outputs),
    )


def test_a_tensor_of_another_dtype_is_cast() -> None:
    plan = bridge.plan(TINY, "gguf", dtype="fp16")
    vectors = sum(spec.size for spec in plan.sources.values() if len(spec.shape) == 1)  # GGUF keeps them in float32
    assert work_of(plan).values == {"cast": sum(s.size for s in plan.sources.values()) - vectors, "copy": vectors}


def test_every_operation_of_a_scheme_was_measured() -> None:
    names = {operation_of(numeric) for name in scheme_names() for numeric in load_scheme(name).weight}
    speeds = read_speeds()
    for table in (speeds.write, speeds.verify):  # types of llama.cpp that were not measured count as its slowest
        assert not {name for name in names - {*table} if name.split()[0] not in SEARCHED}
        assert {"once", "tensor", "copy", "cast", "smoothed"} <= {*table}
        assert all(value >= 0 for value in table.values())


def test_the_table_is_that_of_the_points() -> None:
    points, speeds = json.loads(speed.POINTS.read_text()), read_speeds()
    made = tomllib.loads(speed.table(points, speeds.probe))
    for stage in speed.STAGES:
        assert getattr(speeds, stage) == pytest.approx(made.pop(stage), rel=0.02)  # the last digit is the library's
    assert {name: getattr(speeds, name) for name in made} == {**made, "targets": tuple(made["targets"])}


def test_points_that_were_left_out_are_predicted() -> None:
    """Nine of ten within the error that a plan tells, and none by a factor of two."""
    points = json.loads(speed.POINTS.read_text())
    errors = sorted(abs(seconds / real - 1) for _, real, seconds in speed.left_out(points))
    assert len(errors) >= 0.9 * len(points)
    assert errors[int(0.9 * len(errors))] <= read_speeds().error + 0.05
    assert errors[len(errors) // 2] < 0.15
    assert errors[-1] < 1


def test_the_largest_model_is_predicted_from_smaller_ones() -> None:
    """No size of its own is in the fit: within a third, which is no number of the fit."""
    points = json.loads(speed.POINTS.read_text())
    largest, others = ([point for point in points if (point["size"] == "1.1b") is same] for same in (True, False))
    fits = {stage: speed.fit(others, stage) for stage in speed.STAGES}
    for point in largest:
        seconds = speed.predicted(fits, Work(**point["work"]), point.get("cores", speed.CORES))
        assert seconds == pytest.approx(speed.wall(point), rel=1 / 3), point["scheme"]
    assert len(largest) == len(speed.STREAMED) + len(speed.ONE_CORE) / 2


def test_the_slowest_of_processor_source_and_disk_decides(plan: Plan) -> None:
    plan = large(plan, 2000)  # 12 GB
    work = work_of(plan)
    quick = estimate(plan, machine=QUICK)
    assert quick.bound == PROCESSOR
    slow_source = estimate(plan, verify=False, machine=replace(QUICK, source=1e8))
    assert slow_source.bound == SOURCE
    assert slow_source.stages["write"] == pytest.approx(work.read / 1e8)
    slow_disk = estimate(plan, verify=False, machine=replace(QUICK, disk=1e7))
    assert slow_disk.bound == DISK
    assert slow_disk.stages["write"] == pytest.approx(work.written / 1e7)
    assert estimate(bridge.plan(TINY, "hf"), machine=QUICK).bound == START
    reads = quick.stages["verify"] + quick.stages["write"] / 2
    both = estimate(plan, machine=Machine(2, source=work.read / reads, cache=1 << 50))
    assert both.bound == SOURCE  # of writing; the processor works longer in all, but not while it is waited for
    assert both.waits[PROCESSOR] > both.waits[SOURCE] == pytest.approx(both.stages["write"])


def test_cores_share_values_and_not_what_is_done_for_a_tensor(plan: Plan) -> None:
    plan = large(plan, 2000)
    one, four, endless = (estimate(plan, machine=Machine(cores)) for cores in (1, 4, 10**9))
    tables = (read_speeds().write, read_speeds().verify)
    alone = sum(table["once"] + table["tensor"] * work_of(plan).tensors for table in tables)
    assert endless.waits[PROCESSOR] == pytest.approx(alone)
    assert one.waits[PROCESSOR] - alone == pytest.approx(4 * (four.waits[PROCESSOR] - alone))
    assert one.seconds == pytest.approx(2 * estimate(plan, machine=Machine(1, speed=2.0)).seconds)


def test_what_stays_in_memory_is_not_read_again_to_verify_it(plan: Plan) -> None:
    plan = large(plan, 2000)
    disk = Machine(1000, disk=1e8, source=1e8)
    work = work_of(plan)
    kept = estimate(plan, machine=replace(disk, cache=100 << 30))
    assert kept.stages["verify"] < 1
    assert kept.waits[DISK] == 0  # the system writes later
    again = estimate(plan, machine=disk)
    assert again.stages["verify"] == pytest.approx(work.read / 1e8)
    assert again.waits[DISK] == pytest.approx(2 * work.written / 1e8)


def test_what_is_assumed_and_what_is_missing_is_told(plan: Plan) -> None:
    from_server = estimate(large(plan, 2000), "https://host/model")
    assert from_server.rate == read_speeds().remote
    assert str(from_server).endswith("limited by reading the source at 670 MB/s, which is assumed")
    assert estimate(plan, "org/at-the-hub").waits[SOURCE] == pytest.approx(work_of(plan).read / read_speeds().disk)
    assert str(estimate(bridge.plan(TINY, "hf", "fp8"), machine=QUICK)).endswith(", without the calibration")
    assert str(estimate(bridge.plan(TINY, "trt", "int8_wo"), machine=QUICK)).endswith(
        "without the graph or other files of trt"
    )


def test_no_weight_is_read_and_a_model_in_memory_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    source = made_llama()
    made = bridge.plan(source, "hf", "int8_wo")
    monkeypatch.setattr(type(source), "read_rows", None)
    monkeypatch.setattr(type(source), "tensor", None, raising=False)
    assert estimate(made, source).waits[SOURCE] == 0


def test_an_estimate_takes_little_beside_a_plan(plan: Plan) -> None:
    _, calls = counted(estimate, plan, str(TINY))
    _, planning = counted(bridge.plan, TINY, "hf", "nvfp4_wo")
    assert calls < planning / 2


def test_the_core_is_measured_against_the_one_of_the_table(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr(estimates, "probe", lambda: read_speeds().probe * 3)
    slow = estimate(plan, str(TINY))
    monkeypatch.setattr(estimates, "probe", lambda: read_speeds().probe)
    assert slow.stages["start"] == pytest.approx(3 * estimate(plan, str(TINY)).stages["start"])


def test_files_are_asked_whether_memory_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4 << 20))
    looked: list[int] = []

    def half(descriptor: int, buffers: Any, at: int, flags: int = 0) -> int:
        assert flags == os.RWF_NOWAIT
        looked.append(at)
        if at >= 2 << 20:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", half)
    assert cached_share([tmp_path / "model.safetensors"]) == pytest.approx(0.5, abs=0.05)
    assert 32 <= len(looked) <= 128
    made = estimates.machine_here(str(tmp_path), read_speeds())
    assert made.source == pytest.approx(read_speeds().disk * 2, rel=0.1)
    monkeypatch.setattr(machines.os, "preadv", lambda *_: 1)
    assert estimates.machine_here(str(tmp_path), read_speeds()).source == math.inf


@pytest.mark.parametrize("machine", [Machine(0), Machine(2, speed=0.0), Machine(2, disk=-1.0)])
def test_a_machine_without_cores_or_rates_is_refused(plan: Plan, machine: Machine) -> None:
    with pytest.raises(UsageError, match="above 0"):
        estimate(plan, machine=machine)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="str is not a plan"):
        estimate("examples/models/tiny-llama")  # type: ignore[arg-type]
