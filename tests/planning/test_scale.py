"""Conversions on workers of Ray, on paper: what a simulation must hold whatever the rates are."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

import bridge
from benchmarks.scale import KIMI_K2, LLAMA_70B, TASK, Cluster, Part, predict, simulate, spread
from benchmarks.speed import SHAPES
from bridge.planning.estimate import work_of
from bridge.planning.plan import Plan
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from tests.models.sparse_checkpoint import deepseek_specs, llama_specs, write_sparse

CLUSTER = Cluster("", 8, 1e12, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Source]:
    """Twenty layers of 70 B."""
    config = LLAMA_70B | {"num_hidden_layers": 20}
    root = write_sparse(tmp_path_factory.mktemp("sparse") / "model", config, llama_specs(config))
    source = open_source(root)
    return bridge.plan(source, "hf", "fp8_pc_pt"), source


def test_the_largest_shape_has_a_trillion_values() -> None:
    assert 1.0e12 < sum(spec.size for spec in deepseek_specs(KIMI_K2)) < 1.05e12


def test_workers_take_the_next_partition_when_they_are_free() -> None:
    parts = [Part(seconds, 0) for seconds in (4.0, 1.0, 1.0, 2.0)]
    assert simulate(parts, 2, math.inf) == pytest.approx(4)
    assert simulate([Part(part.seconds, 0) for part in parts], 1, math.inf) == pytest.approx(8)


# Measured by `python -m benchmarks.scale_measured shared` (docs/pages/performance.md): workers -> seconds.
MEASURED = {1: 33.6, 2: 16.5, 4: 9.6}


@pytest.mark.parametrize("workers", MEASURED)
def test_what_was_measured_is_predicted(workers: int, tmp_path: Path) -> None:
    """0.1 B from a server that answers after 0.1 s and sends 1 MB/s over a connection, processes of a core each."""
    shape = SHAPES["0.1b"]
    config = shape | {"head_dim": shape["hidden_size"] // shape["num_attention_heads"]}
    root = write_sparse(tmp_path / "model", config, llama_specs(config))
    source = open_source(root)
    cluster = Cluster("", 1, math.inf, workers, network=math.inf, connection=1e6)
    predicted = predict(bridge.plan(source, "hf", "fp8_pc_pt"), source, cluster, verify=False)
    assert predicted.stages["write"] - TASK == pytest.approx(MEASURED[workers], rel=0.15)


def test_workers_share_the_disk_and_leave_what_they_do_not_need() -> None:
    def two() -> list[Part]:
        return [Part(10.0, 10), Part(1.0, 100)]  # one byte a second, and a hundred

    assert simulate(two(), 2, math.inf) == pytest.approx(10)
    assert simulate(two(), 2, 11.0) == pytest.approx(10)  # 1 and 10 bytes a second
    assert simulate(two(), 2, 2.0) == pytest.approx(10 + 90 / 2)


@pytest.mark.parametrize("disk", [1e12, 1e9])
def test_more_workers_are_never_slower(made: tuple[Plan, Source], disk: float) -> None:
    seconds = [spread(*made, replace(CLUSTER, workers=workers, disk=disk))[0] for workers in (1, 2, 4, 16)]
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] >= work_of(made[0]).written / disk


def test_latency_and_connections_bound_what_a_worker_reads() -> None:
    block = 8 << 20
    turn = CLUSTER.latency + block / CLUSTER.connection
    assert CLUSTER.reading(16 * block) == pytest.approx(turn)
    assert CLUSTER.reading(17 * block) == pytest.approx(2 * turn)
    assert replace(CLUSTER, network=1e8).reading(10**9) == pytest.approx(10)
    assert replace(CLUSTER, cores=1).reading(18 * block) == pytest.approx(2 * turn)  # a thread asks for nine of sixteen


def test_verification_and_upload_are_work_of_one_node(made: tuple[Plan, Source]) -> None:
    few, many = (predict(*made, replace(CLUSTER, workers=workers)) for workers in (2, 32))
    assert many.stages["write"] < few.stages["write"] / 4
    assert (many.stages["verify"], many.stages["upload"]) == (few.stages["verify"], few.stages["upload"])
    assert many.shared(32) < many.seconds / 4
    assert "upload" not in predict(*made, Cluster("", 16, 3e9, remote=False)).stages


def test_a_source_on_the_disk_of_the_output_waits_for_both(made: tuple[Plan, Source]) -> None:
    work, slow = work_of(made[0]), Cluster("", 64, 1e8, remote=False)
    assert predict(*made, slow).stages["write"] == pytest.approx((work.read + work.written) / 1e8)
    assert predict(*made, slow).bound == "write: the disk"
