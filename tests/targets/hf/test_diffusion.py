"""Models of diffusers in target `hf`, against ModelOpt's export and diffusers' own loader."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracles.diffusers_oracle import USUAL, answers, needs_diffusers, of_kind

pytestmark = [pytest.mark.slow, needs_diffusers]
MORE = (
    "export:sd3:fp8", "export:sdxl:fp8", "export:pixart:fp8", "export:wan:fp8", "export:dit:fp8", "export:flux:nvfp4",
    "export:sd3:nvfp4", "export:wan:nvfp4", "export:flux:int8_sq", "export:sd3:int8_sq", "export:flux:fp8_pc_pt",
    "export:wan:int8_wo", "export:pixart:nvfp4", "export:sdxl:nvfp4",
)  # fmt: skip
MORE_LOADED = ("loaded:sdxl:fp8_pc_pt", "loaded:wan:fp8_pc_pt", "loaded:flux:nvfp4", "loaded:wan:nvfp4")


def answer(case: str) -> Any:
    name, cases = ("usual", USUAL) if case in USUAL else ("more", (*MORE, *MORE_LOADED))
    return answers(name, cases)[case]


@pytest.mark.parametrize(
    "case", [*of_kind("export"), *(pytest.param(case, marks=pytest.mark.product) for case in MORE)]
)
def test_every_file_equals_modelopts_export(case: str) -> None:
    assert answer(case) == []


@pytest.mark.parametrize(
    "case", [*of_kind("loaded"), *(pytest.param(case, marks=pytest.mark.product) for case in MORE_LOADED)]
)
def test_diffusers_loads_the_weights_and_gives_their_outputs(case: str) -> None:
    modules, apart = answer(case)
    assert modules >= 20 and apart < 5e-6  # float32 sums in another order


def test_a_live_model_gives_the_files_of_its_directory() -> None:
    assert answer("memory:dit") == [True, True]


@pytest.mark.parametrize("name", ["dit", "sd"])
def test_a_pipeline_is_converted_part_by_part(name: str) -> None:
    assert answer(f"pipeline:{name}") == []


@pytest.mark.parametrize("name", ["dit", "sd"])
def test_prompts_over_steps_give_modelopts_amax(name: str) -> None:
    *differ, count = answer(f"prompts:{name}")
    assert differ == [] and count >= 14
