"""A layer above the budget runs its experts one by one, with the bytes of the calibration of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.data import Data, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import fake_quantize  # noqa: E402
from bridge.calibration.walk import experts, routing  # noqa: E402
from bridge.calibration.walk.budget import Need, Room, calibration_need  # noqa: E402
from bridge.calibration.walk.options import Options  # noqa: E402
from bridge.calibration.walk.resume import Partial  # noqa: E402
from bridge.calibration.walk.run import calibrate_by_blocks  # noqa: E402
from bridge.core.errors import CalibrationError, UsageError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.quant.schemes.scheme import Scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.sources.source import Source  # noqa: E402
from tests.calibration.walk.test_walk import CountedReads  # noqa: E402
from tests.calibration.walk.walked_models import MIXTURES, batches, mixture  # noqa: E402
from tests.covering import grid  # noqa: E402

SCHEMES = {
    "fp8 + kv": ("fp8", "fp8"),
    "int8_sq": ("int8_sq", None),
    "nvfp4": ("nvfp4", None),
    "int4_awq": ("int4_awq", None),
    "int4_awq + kv": ("int4_awq", "fp8"),
}


def opened(root: Path, quant: str, kv: str | None = None) -> tuple[Any, Scheme, Data]:
    source = open_source(root)
    return source, load_scheme(quant, kv=kv).bound(structure_of(source).sites), prepare(batches(), source)


def whole(source: Source, scheme: Scheme, data: Data) -> Calibration:
    return fake_quantize(CalibrationJob(source, structure_of(source), scheme, data)).calibration


def walked(
    source: Source, scheme: Scheme, data: Data, room: Room | None = None, partial: Path | None = None
) -> Calibration:
    """With the layers that have experts cut, which are the largest blocks of these models, or with `room`."""
    room = room or Room(calibration_need(source.specs, source.config, scheme).blocks.nbytes - 1, 0)
    return calibrate_by_blocks(
        CalibrationJob(source, structure_of(source), scheme, data, partial=partial), Options(room=room)
    )


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The experts that ran alone, in order."""
    seen: list[int] = []
    alone = routing.alone

    @contextmanager
    def noted(module: Any, expert: int, *more: Any) -> Iterator[None]:
        seen.append(expert)
        with alone(module, expert, *more):
            yield

    monkeypatch.setattr(experts, "alone", noted)
    return seen


@grid(
    {"family": list(MIXTURES), "scheme": list(SCHEMES), "dtype": ["float32", "bfloat16"]},
    # in other schemes its experts stay unquantized
    valid=lambda family, scheme, _: family != "GptOssForCausalLM" or scheme == "fp8 + kv",
)
def test_statistics_are_those_of_the_whole_model(
    family: str, scheme: str, dtype: str, tmp_path: Path, taken: list[int]
) -> None:
    mixture(family, getattr(torch, dtype)).save_pretrained(tmp_path)
    source, bound, data = opened(tmp_path, *SCHEMES[scheme])
    found = walked(source, bound, data)
    assert taken
    assert found.to_bytes() == whole(source, bound, data).to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [0, 1])
def test_each_expert_is_read_once_and_again_for_the_quantized_answers(held_out: int, tmp_path: Path) -> None:
    mixture("MixtralForCausalLM").save_pretrained(tmp_path)
    source, scheme, data = opened(tmp_path, "fp8")
    counted = CountedReads(source)
    walked(counted, scheme, replace(data, held_out=data.held_out[:held_out]))
    assert counted.read_bytes == {
        name: spec.nbytes * (1 + held_out * (".experts." in name)) for name, spec in source.specs.items()
    }


@pytest.mark.slow
def test_the_budget_alone_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    mixture("MixtralForCausalLM").save_pretrained(tmp_path)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    monkeypatch.setattr("bridge.calibration.walk.budget.EXPERT", 2)
    source, scheme, _ = opened(tmp_path, "fp8")
    need = need_of(source, scheme)
    assert need.experts.in_files < need.blocks.in_files < need.blocks.held < need.whole
    made = {}
    for memory in (need.whole, need.blocks.held, need.blocks.in_files, need.blocks.in_files - 1, need.least):
        made[memory] = bridge.calibrate(tmp_path, "fp8", batches(), memory=memory).digest
        assert bool(taken) is (memory < need.blocks.in_files)
    assert len({*made.values()}) == 1


def need_of(source: Source, scheme: Scheme) -> Need:
    from bridge.calibration.walk.budget import tokens_of

    return calibration_need(source.specs, source.config, scheme, tokens_of(prepare(batches(), source)))


def test_plan_and_refusal_name_what_is_largest_with_one_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture("MixtralForCausalLM").save_pretrained(tmp_path)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    monkeypatch.setattr("bridge.calibration.walk.budget.EXPERT", 2)
    source, scheme, _ = opened(tmp_path, "fp8")
    need, part = need_of(source, scheme), "model.layers.0 with one expert of 5 at a time"
    assert need.experts.largest == part
    weighted = need_of(source, load_scheme("q4_k_imatrix"))  # collected from whole layers
    assert weighted.experts == weighted.blocks and "expert by expert" not in weighted.line()
    assert f"expert by expert (the largest is {part}, " in need.line()
    for way in ("load_model", "load_skeleton", "read", "read_rows"):
        monkeypatch.setattr(type(source), way, lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(UsageError, match=f"too little to calibrate: {part} has .* give at least {need.least} "):
        bridge.calibrate(tmp_path, "fp8", batches(), memory=need.least - 1)


@pytest.mark.slow
def test_experts_that_cannot_run_alone_are_refused_before_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture("MixtralForCausalLM").save_pretrained(tmp_path)
    source, scheme, data = opened(tmp_path, "fp8")
    monkeypatch.setattr(experts, "why_not", lambda _: "it holds more than stacks of experts")
    for way in ("read", "read_rows"):
        monkeypatch.setattr(type(source), way, lambda *_: pytest.fail("a weight was read"))
    message = r"model.layers.0 has .*mlp.experts \(MixtralExperts\) cannot run expert by expert.* at least 789 bytes"
    with pytest.raises(UsageError, match=message):
        walked(source, scheme, data, Room(50_000, 789))


@pytest.mark.slow
def test_a_class_that_sums_experts_with_another_rounding_is_told_apart() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts

    with torch.device("meta"):
        mixtral = MixtralExperts(MixtralConfig()).to(torch.bfloat16)
        nemotron = NemotronHExperts(NemotronHConfig(n_routed_experts=8, hidden_size=64, moe_intermediate_size=48)).to(
            torch.bfloat16
        )
    for module in (mixtral, nemotron):
        module.config._experts_implementation = "grouped_mm"
    assert routing.why_not(mixtral) == ""
    assert routing.why_not(nemotron.to(torch.float32)) == ""
    # it adds up in the dtype of the routing weights, which is float32 in a model of bfloat16
    assert routing.why_not(nemotron.to(torch.bfloat16)) == "its sum over experts has another rounding"


@pytest.mark.slow
def test_nan_is_named_with_the_expert_that_holds_it(tmp_path: Path) -> None:
    model = mixture("MixtralForCausalLM")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match=r"^model.layers.1.mlp.experts makes NaN .*: its down_proj\[3"):
        walked(*opened(tmp_path, "fp8"))


class _Stopped(BaseException):
    """Stands for the end of a process."""


@pytest.mark.slow
def test_a_run_that_ends_between_layers_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture("MixtralForCausalLM").save_pretrained(tmp_path / "model")
    arguments = opened(tmp_path / "model", "int4_awq", "fp8")
    keep = Partial.keep

    def stop(self: Partial, block: Any, *more: Any) -> bool:
        done = keep(self, block, *more)
        if block.name == "model.layers.0":
            raise _Stopped
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", stop)
        with pytest.raises(_Stopped):
            walked(*arguments, partial=tmp_path / "partial")
    assert walked(*arguments, partial=tmp_path / "partial").digest == walked(*arguments).digest
