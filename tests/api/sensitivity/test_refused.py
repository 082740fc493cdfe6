"""Schemes that no target takes, fallbacks and recipes that cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

import bridge
from bridge.api.sensitivity.job import Question, make_job
from bridge.cli.flags import FLAGS
from bridge.core.errors import BridgeWarning, PlanError, SchemeError, UsageError
from bridge.sources.opening import open_source
from tests.models.export_families import GPT2, tokens


def narrow(n_inner: int) -> Any:
    """A GPT-2 whose matrices have in = 80, but for `mlp.c_proj`."""
    model = GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_embd": 80, "n_inner": n_inner}))
    model.config.architectures = [type(model).__name__]
    return model


@pytest.mark.slow
def test_what_no_target_takes_is_told_and_kept_out_of_a_recipe_that_plans(tmp_path: Path) -> None:
    model = narrow(384)
    found = bridge.sensitivity(model, "int4_wo", tokens(), budget="kl=1")
    fits = {f"transformer.h.{n}.mlp.c_proj" for n in (0, 1)}
    assert {name for layer in found.layers for name in layer.modules} == fits
    assert found.notes[0] == "6 more stay unquantized: target hf does not support them in int4_wo"
    assert "transformer.h.{0..1}.mlp.c_fc: in = 80 does not divide into blocks of 128" in found.notes[1]
    plan = bridge.plan(model, "hf", quant=found.save(tmp_path / "recipe.toml"))
    assert {step.site.module for step in plan.quantized if step.site} == fits


def test_a_scheme_that_no_target_takes_at_all_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(SchemeError, match=r"no target supports GPT2LMHeadModel in scheme int4_wo; hf:\n.*in = 80 does"):
        make_job(open_source(narrow(200)), Question("int4_wo"))


def test_a_fallback_that_does_not_fit_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(SchemeError, match=r"fallback int4_wo does not fit target hf; choose another:\n.*in = 80 does"):
        make_job(open_source(narrow(384)), Question("int8_wo", fallback="int4_wo"))


@pytest.mark.slow
def test_a_recipe_that_cannot_be_planned_is_an_error_and_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.api.sensitivity.run.recipe", lambda *_: 'base = "int4_wo"\n')
    with pytest.raises(PlanError, match="in = 80 does not divide"):
        bridge.sensitivity(narrow(384), "int4_wo", tokens(), budget="kl=1")


def test_the_recipe_of_one_scheme_is_planned_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("bridge.api.sensitivity.run.recipe", lambda *_: 'base = "int4_wo"\n')
    monkeypatch.setattr("bridge.api.sensitivity.run.room_for", never)
    with pytest.raises(PlanError, match="in = 80 does not divide"):
        bridge.sensitivity(narrow(384), "int4_wo", tokens(), budget="kl=1")


@pytest.mark.slow
def test_the_ranking_is_written_before_a_recipe_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: Any) -> None:
        raise SchemeError("no choice")

    monkeypatch.setattr("bridge.api.sensitivity.run.choose", never)
    path = tmp_path / "ranking.json"
    with pytest.raises(SchemeError, match="no choice"), pytest.warns(BridgeWarning, match="the layers were ranked"):
        bridge.sensitivity(narrow(384), "int4_wo", tokens(), budget="kl=1", ranking=path)
    found = json.loads(path.read_text())
    assert {layer["name"] for layer in found["layers"]} == {f"transformer.h.{n}.mlp.c_proj" for n in (0, 1)}
    with pytest.raises(UsageError, match=r"a ranking ends in \.json"):
        bridge.sensitivity(narrow(384), "int4_wo", tokens(), budget="kl=1", ranking=tmp_path / "ranking.txt")


def test_auto_says_the_budget_and_the_schemes_with_commas_of_its_own() -> None:
    assert FLAGS["sensitivity.quant"].read
    assert FLAGS["sensitivity.quant"].read("auto:9bits:int8_wo,fp8") == "auto:9bits:int8_wo,fp8"
    job = make_job(open_source(narrow(384)), Question("auto:9bits:int8_wo,fp8"))
    assert job.several and job.named == ("int8_wo", "fp8") and job.budget and job.budget.text == "9bits"
    with pytest.raises(UsageError, match="says its budget and schemes; leave out budget='5bits'"):
        Question("auto:9bits:int8_wo,fp8", budget="5bits")
