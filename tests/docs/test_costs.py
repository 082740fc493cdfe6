"""The table of costs has every scheme and no other, and what is picked from it is loaded and the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.core.errors import TableError
from bridge.planning.contract_files import runtimes
from bridge.quant.describe import nominal_bits
from bridge.quant.schemes import costs as module
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.costs import EMBEDDING, LANGUAGE, PLAIN, read_costs
from bridge.quant.schemes.load import load_scheme
from docs.generate import costs

AGAIN = "python benchmarks/schemes.py --only"


def test_every_scheme_is_measured_and_nothing_else() -> None:
    measured, known = set(read_costs()) - {PLAIN}, set(scheme_names())
    assert measured == known, f"{AGAIN} {' '.join(sorted(known - measured))}; no scheme: {sorted(measured - known)}"


@pytest.mark.parametrize("scheme", read_costs())
def test_a_row_has_all_figures_or_the_reason_why_not(scheme: str) -> None:
    rows = read_costs()[scheme]
    assert set(rows) == {*LANGUAGE, *EMBEDDING}
    for model, cost in rows.items():
        figures = [cost.kl, cost.perplexity] if model in LANGUAGE else [cost.cosine, cost.error]
        figures += [] if scheme == PLAIN else [cost.bits, cost.seconds]
        assert all(figure is None for figure in figures) if cost.why else None not in figures, model


def test_measured_bits_are_the_nominal_ones_and_those_of_scales_above_blocks() -> None:
    for name, rows in read_costs().items():
        if name == PLAIN or load_scheme(name).only or name in ("q4_0", "q8_0"):  # GGUF has their scales in 16 bits
            continue
        if load_scheme(name).file_type:  # several types
            continue
        for model, cost in rows.items():
            # a float32 scale for a channel of 128 values takes 0.25 bits, and so does its pre-scale
            assert cost.why or 0 <= cost.bits - nominal_bits(load_scheme(name)) < 0.5, (name, model)


def test_a_figure_or_model_that_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "mappings", lambda: tmp_path)
    for text, said in (
        ("[fp8]\ntiny-lama = { kl = 1.0 }", r"costs.toml:2: tiny-lama is not a model that is measured"),
        ("[fp8]\ntiny-llama = { kll = 1.0 }", r"\[fp8\] tiny-llama: .*'kll'"),
    ):
        (tmp_path / "costs.toml").write_text(text)
        with pytest.raises(TableError, match=said):
            read_costs()


def test_what_is_picked_is_a_scheme_and_says_its_figures() -> None:
    assert {name for _, name, _ in costs.PICKS} <= set(scheme_names())
    assert f"| {read_costs()['int4_mse']['tiny-llama'].kl:.4f} |" in costs.picks()


@pytest.mark.slow
def test_the_best_of_a_program_is_loaded_by_it_and_has_the_least_divergence() -> None:
    by_name = {f"`{runtime.name}`": runtime for runtime in runtimes()}
    for line in costs.best().splitlines()[2:]:
        program, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell in filter(None, cells):
            name = cell.partition("`")[2].partition("`")[0]
            assert any(not of.lacks(load_scheme(name).formats) for of in by_name[program].contracts)
            assert cell.endswith(f" {read_costs()[name]['tiny-llama'].kl:.4f}")
    assert "[`nvfp4_wo:mse`](nvfp4_wo-mse.md)" in next(line for line in costs.best().splitlines() if "`vllm`" in line)


@pytest.mark.slow
def test_the_benchmark_measures_what_modelopts_fake_quantized_model_gives() -> None:
    from benchmarks.schemes import Bench, measure, modelopt

    bench = Bench("tiny-gpt2")
    ours, theirs = measure(bench, "int8_sq"), modelopt(bench, "int8_sq")
    row = read_costs()["int8_sq"]["tiny-gpt2"]
    assert ours.kl == pytest.approx(theirs.kl, rel=0.05)  # 0.00046 both; without the inputs' codes 0.0001
    assert (ours.kl, ours.perplexity, ours.bits) == pytest.approx((row.kl, row.perplexity, row.bits), rel=0.05)
