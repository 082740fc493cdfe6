"""Method "block" ranks as "kl" does, holds one block, and refuses what it cannot do before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from click.testing import CliRunner  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

import bridge  # noqa: E402
from bridge.api.request import Request  # noqa: E402
from bridge.api.sensitivity import automatic  # noqa: E402
from bridge.api.sensitivity.automatic import choose_recipe  # noqa: E402
from bridge.cli.main import app  # noqa: E402
from bridge.core.errors import CalibrationError, UsageError  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

MODEL = "examples/models/tiny-llama"
SMALL = {"samples": 4, "sequence": 64}
LITTLE = 600_000  # bytes: enough for a block of a tiny model, not for all of it


def saved(path: Path, family: str = "LlamaForCausalLM", **fields: Any) -> Path:
    build(family, torch.float32, **fields).save_pretrained(path)
    return path


def unread(model: Path, monkeypatch: pytest.MonkeyPatch, *ways: str) -> None:
    """Let sources of this kind fail when a model is loaded or read."""
    kind = type(open_source(model))
    for way in ways:
        monkeypatch.setattr(kind, way, lambda *_: pytest.fail("a weight was read"))


@pytest.mark.slow
def test_layers_are_ranked_much_as_divergences_rank_them() -> None:
    costs = [
        {layer.name: layer.cost for layer in bridge.sensitivity(MODEL, "int4_wo", method=method, **SMALL).layers}
        for method in ("kl", "block")
    ]
    assert spearmanr([costs[0][name] for name in costs[0]], [costs[1][name] for name in costs[0]]).statistic > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "CohereForCausalLM", "Gemma2ForCausalLM"])
def test_the_head_costs_its_divergence(family: str, tmp_path: Path) -> None:
    """Cohere scales its logits and Gemma 2 caps them, after the head."""
    (tmp_path / "head.toml").write_text('base = "int8_wo"\n[[rule]]\nmodules = ["lm_head"]\nquant = "fp8"\n')
    model = saved(tmp_path / "model", family, tie_word_embeddings=False)
    found = [bridge.sensitivity(model, tmp_path / "head.toml", batches(), method=method) for method in ("kl", "block")]
    kl, block = ({layer.name: layer.cost for layer in one.layers}["lm_head"] for one in found)
    assert block == pytest.approx(kl, rel=1e-9) and kl > 0


@pytest.mark.slow
def test_a_choice_within_little_memory_reports_block_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path / "model", num_hidden_layers=5)
    large = bridge.sensitivity(model, ["int8_wo", "fp8"], batches(), method="block", budget="8.3bits")
    assert large.choice and large.choice.measured and not large.notes
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    unread(model, monkeypatch, "load_model")
    small = bridge.sensitivity(model, ["int8_wo", "fp8"], batches(), method="block", budget="8.3bits", memory=LITTLE)
    assert small.choice and small.choice.measured is None
    assert small.layers == large.layers and small.choice.formats == large.choice.formats
    assert f"block errors of {small.choice.expected:.3g} in sum on 48 held-out tokens" in small.recipe
    assert "divergence not measured" in small.lines()[-1]
    assert small.notes[0].startswith("the divergence of the choice was not measured: the whole model takes")
    assert bridge.plan(model, "hf", quant=small.save(tmp_path / "recipe.toml"))


@pytest.mark.slow
def test_an_automatic_choice_within_little_memory_ranks_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path / "model", num_hidden_layers=5)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    unread(model, monkeypatch, "load_model")

    def choose(quant: str, memory: int | None) -> str:
        request = Request(model, "hf", quant, tmp_path / "out", data=batches(), memory=memory)
        return choose_recipe(open_source(model), request)[1]

    first = choose("auto:8.3bits:int8_wo,fp8", LITTLE)
    assert "divergence not measured" in first
    monkeypatch.setattr(automatic, "measured", lambda *_: pytest.fail("the model was measured again"))
    assert choose("auto:8.3bits:int8_wo,fp8", LITTLE) == first
    with pytest.raises(UsageError, match=r"to measure divergences; give a budget of bits or bytes"):
        choose("auto:kl=0.01:int8_wo,fp8", LITTLE)
    monkeypatch.setattr("bridge.api.sensitivity.job.free_memory", lambda _: LITTLE)
    with pytest.raises(UsageError, match=r"more than is free; give memory="):
        choose("auto:8.4bits:int8_wo,fp8", None)


@pytest.mark.slow
def test_encoders_have_block_errors_too(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "BertForMaskedLM")
    found = bridge.sensitivity(model, "int8_sq", batches(), method="block", kv=None)
    assert all(0 < layer.cost < 1 and 0.9 < (layer.formats[0].cosine or 0) <= 1 for layer in found.layers)
    assert found.cost_is == "relative squared error of its block's output"


@pytest.mark.slow
def test_the_kv_cache_is_in_the_errors_of_all_but_not_in_those_of_layers(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    plain, cached = (bridge.sensitivity(model, "fp8", batches(), method="block", kv=kv) for kv in (None, "fp8"))
    assert cached.cache and plain.cache is None
    assert cached.layers == plain.layers
    assert plain.whole < cached.whole < 1.5 * (plain.whole + cached.cache)


@pytest.mark.slow
def test_methods_that_run_the_whole_model_are_refused_before_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path / "model", num_hidden_layers=5)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    unread(model, monkeypatch, "load_model", "load_skeleton", "read", "read_rows")
    for method in ("kl", "modelopt"):
        with pytest.raises(UsageError, match=rf"method='{method}' runs the whole model.*; use method='block'"):
            bridge.sensitivity(model, "int8_wo", batches(), method=method, memory=LITTLE)
    with pytest.raises(UsageError, match=r"too little for method='block': model\.layers\.0 has .*at least \d+ bytes"):
        bridge.sensitivity(model, "int8_wo", batches(), method="block", memory="100kB")
    with pytest.raises(UsageError, match=r"use at least \d+ bytes and method='block' .*, or give at least \d+ bytes"):
        bridge.sensitivity(model, "int8_wo", batches(), memory="100kB")


def test_what_blocks_cannot_do_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    with pytest.raises(UsageError, match="block errors are not in nats; use method='kl', or give bits or bytes"):
        bridge.sensitivity(model, "int8_wo", batches(), method="block", budget="kl=0.01")
    with pytest.raises(CalibrationError, match=r"a forward_loop runs the whole model.* give batches"):
        bridge.sensitivity(MODEL, "fp8", lambda model: None, method="block")


@pytest.mark.slow
def test_the_command_takes_method_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sensitivity", MODEL, "--quant", "int8_wo", "--samples", "4", "--sequence", "64", "--memory", "1GB"]
    done = CliRunner().invoke(app, [*words, "--method", "block", "--budget", "9bits"])
    assert done.exit_code == 0, done.stderr
    assert "in block errors" in done.stdout and "measured" in done.stdout
