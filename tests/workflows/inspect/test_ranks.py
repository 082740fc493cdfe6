"""Two processes see together what one sees alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.oracles import megatron_oracle
from tests.workflows.inspect import rank_process

pytestmark = pytest.mark.slow  # two processes load torch
CASES = ["whole", "idle", "broken", "seldom"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def of_ranks(place: Path) -> dict[int, dict[str, Any]]:
    context = megatron_oracle.processes()  # which have imported torch
    results = context.Queue()
    given = str(place / "store"), str(place), CASES, results
    both = [context.Process(target=rank_process.main, args=(rank, *given)) for rank in range(2)]
    for one in both:
        one.start()
    found = dict(results.get(timeout=300) for _ in both)
    for one in both:
        one.join(10)
    return found


def values(records: Any) -> dict[tuple[int, str, str, str], float | None]:
    return {(r.step, r.layer, r.tensor, r.stat): r.value for r in records}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_tell_what_one_tells_of_all(case: str, of_ranks: dict[int, dict[str, Any]]) -> None:
    whole = values(rank_process.run(case, None))
    assert whole
    for rank in range(2):
        told = values(of_ranks[rank][case])
        assert told.keys() == whole.keys()
        for key, value in whole.items():
            close = value if value is None else pytest.approx(value, rel=1e-6, abs=1e-12)
            assert told[key] == close, key


def test_what_is_not_finite_counts_wherever_it_is(of_ranks: dict[int, dict[str, Any]]) -> None:
    told = values(of_ranks[0]["broken"])
    assert told[0, "first", "activation", "nan%"] == pytest.approx(100 / (12 * 8))
    assert told[1, "first", "activation", "inf%"] == pytest.approx(100 / (12 * 8))


def test_only_the_first_process_writes(of_ranks: dict[int, dict[str, Any]], place: Path) -> None:
    assert (place / "seen0" / "inspect.json").exists() and not (place / "seen1").exists()


def test_processes_with_other_layers_have_all_records(of_ranks: dict[int, dict[str, Any]]) -> None:
    told = values(of_ranks[1]["stages"])
    assert told == values(of_ranks[0]["stages"])
    assert {key[1] for key in told} == {"stage0", "stage1"}


def test_a_sharded_matrix_is_seen_whole(of_ranks: dict[int, dict[str, Any]]) -> None:
    whole = values(rank_process.sharded(None))
    told = values(of_ranks[0]["sharded"])
    for key, value in whole.items():
        own_scales = key[3].startswith(("int8", "mxfp8", "max_blockwise"))  # those of the halves
        if key[2] == "weight" or (key[2] in ("output", "gradient", "wgrad") and not own_scales):
            assert told[key] == pytest.approx(value, rel=1e-5, abs=1e-12), key


def test_calls_of_transformer_engine_tell_what_one_process_sees_of_all(
    of_ranks: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    whole = rank_process.door(None, tmp_path)
    assert len(whole) == 4 * (4 + 2)  # of four tensors, each of which is two in both processes or one in one
    for rank in range(2):
        told = of_ranks[rank]["door"]
        for name, value in whole.items():
            assert told[name] == pytest.approx(value), name


def test_weights_and_what_skips_the_reduction_are_of_each_process(of_ranks: dict[int, dict[str, Any]]) -> None:
    first, second = of_ranks[0]["door"], of_ranks[1]["door"]
    for name in ("both.fc_weight_numel 0", "alone.fc_activation_numel 0"):
        assert (first[name], second[name]) == (8, 12)
    assert first["shard.fc_weight_numel 0"] == second["shard.fc_weight_numel 0"] == 20  # split over tp_group
    assert (first["whole"], first["own"]) == ({"max": 7.0, "mean": 2.3}, {"max": 7.0, "mean": 3.5})
    assert second["whole"] == first["whole"]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


EVERY = [f"dumps/rank_{rank}/step_00000{step}.safetensors" for rank in range(2) for step in range(2)]


def test_tensors_of_all_are_in_one_directory_of_one_disk(of_ranks: dict[int, dict[str, Any]], place: Path) -> None:
    seen = of_ranks[0]["dumped"][0]
    assert files(place / "shared") == [*seen.dumps] == EVERY
    assert not (place / "shared.dumps").exists() and not any("disk" in note for note in seen.notes)


def test_each_keeps_its_tensors_on_a_disk_of_its_own(of_ranks: dict[int, dict[str, Any]], place: Path) -> None:
    for rank in range(2):
        assert [path.name for path in (place / f"disk{rank}").iterdir()] == ["seen"]  # nothing blocks the next run
        assert files(place / f"disk{rank}" / "seen") == EVERY[2 * rank : 2 * rank + 2]
    seen = of_ranks[0]["dumped"][1]
    assert [*seen.dumps] == EVERY[:2]
    assert any("files of rank_1 are on its own disk, in dumps there" in note for note in seen.notes)


def test_whole_steps_of_others_stay_after_an_error(of_ranks: dict[int, dict[str, Any]], place: Path) -> None:
    assert of_ranks and files(place / "failed.dumps") == [name.removeprefix("dumps/") for name in EVERY[2:]]


def test_an_error_of_one_process_ends_all(of_ranks: dict[int, dict[str, Any]]) -> None:
    assert of_ranks[0]["taken"].startswith("WriteError")
    assert of_ranks[1]["taken"].startswith("InspectError: rank 0: ")


def test_what_one_process_refuses_at_the_start_all_refuse(of_ranks: dict[int, dict[str, Any]]) -> None:
    """Each would wait for the other, and so would the next session."""
    for rank in range(2):
        *errors, left = of_ranks[rank]["refused"]
        for error, at in zip(errors, (1, 1, 0), strict=True):
            assert (f"Error: rank {at}: " in error) == (rank != at) and error != "entered", error
        assert left == "False"
