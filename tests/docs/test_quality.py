"""The table of quality: its rows are known, unmeasured ones say so, and pages take their figures from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from bridge.core.errors import TableError
from bridge.core.mappings import table_files
from bridge.planning.contract_files import runtimes
from bridge.quant.describe import nominal_bits
from bridge.quant.schemes.catalog import best_names, scheme_names, without_data
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import DITHERED, EMBEDDING, GIVEN, KINDS, LANGUAGE, PLAIN, Quality, read_quality
from bridge.quant.schemes.scheme import Scheme
from docs.generate import quality

AUTOMATIC = "auto:4.8bits"
ROWS = {
    (kind, name, model): row for kind in KINDS for name, of in read_quality(kind).items() for model, row in of.items()
}


def test_every_row_is_a_scheme_with_options_of_convert_or_a_peer() -> None:
    from benchmarks.evaluation.peers import PEERS

    assert {name.split()[0] for name in read_quality()} - {PLAIN} <= {*scheme_names(), *best_names(), AUTOMATIC}
    assert set(read_quality(KINDS[1])) <= set(PEERS)


@pytest.mark.parametrize(("kind", "name", "model"), ROWS)
def test_a_row_has_all_figures_of_its_model_or_the_reason_why_not(kind: str, name: str, model: str) -> None:
    row = ROWS[kind, name, model]
    figures = [row.kl, row.perplexity] if model in LANGUAGE else [row.cosine, row.error]
    others = [row.cosine, row.error] if model in LANGUAGE else [row.kl, row.perplexity]
    assert all(figure is None for figure in figures) if row.why else None not in figures
    assert all(figure is None for figure in others)
    assert model in (*LANGUAGE, *EMBEDDING)


def test_measured_bits_are_the_nominal_ones_and_those_of_scales_above_blocks() -> None:
    for (kind, name, model), row in ROWS.items():
        scheme = load_scheme(name) if kind == KINDS[0] and name in scheme_names() else None
        if scheme and row.bits and not (scheme.only or scheme.file_type):  # a part of the model; a type for each tensor
            nominal = 4.5 if name == "q4_0" else 8.5 if name == "q8_0" else nominal_bits(scheme)
            # a float32 scale for a channel of 128 values takes 0.25 bits, and so does its pre-scale
            assert -0.01 <= row.bits - nominal < 0.51, (name, model)


def test_a_figure_model_or_kind_that_is_unknown_is_named(tmp_path: Path) -> None:
    path = tmp_path / "quality.toml"
    for text, said in (
        ('[scheme."int4:rtn"]\ntiny-lama = { kl = 1.0 }', r"quality.toml:2: tiny-lama is not a model that is measured"),
        ("[scheme.fp8]\ntiny-llama = { kll = 1.0 }", r"\[scheme.fp8\] tiny-llama: .*'kll'"),
        ("[fp8]\ntiny-llama = { kl = 1.0 }", "unknown key `fp8`"),
    ):
        path.write_text(text)
        with pytest.raises(TableError, match=said):
            read_quality(path=path)


def test_the_page_has_every_scheme_and_says_which_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"fp8": {DITHERED: Quality(bits=8.0, kl=0.03125, kl_error=0.001, perplexity=21.0, agreement=0.9)}}
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows if kind == KINDS[0] else {})
    lines = {line.split("`")[1]: line for line in quality.schemes().splitlines() if "`" in line}
    assert set(lines) == set(scheme_names())
    assert "| 0.0312 | 0.0010 |" in lines["fp8"] and lines["fp8"].count(quality.NOT) == 1  # given
    assert lines["int4_wo"].count(quality.NOT) == 2
    rows["int8_wo"] = {GIVEN: Quality(kl=0.5)}
    assert quality.kl_words("int8_wo") == "0.5000 given"
    assert quality.kl_words("fp8") == "0.0312" and quality.kl_words("int4_wo") == quality.NOT
    assert quality.tasks() == "not measured."


def test_rows_say_their_draws_and_how_far_these_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"int4:gptq": {DITHERED: Quality(bits=4.25, kl=0.3, draws=(0.2, 0.3, 0.4))}, "fp8": {}}
    rows[AUTOMATIC] = {DITHERED: Quality(bits=4.798, kl=0.25)}  # which has no scheme before it is measured
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows if kind == KINDS[0] else {})
    lines = {line.split("`")[1]: line for line in quality.schemes().splitlines() if "`" in line}
    assert "| 3, &#177;0.1000 |" in lines["int4:gptq"] and "177" not in lines["fp8"]
    assert "| 4.80 | yes |" in lines[AUTOMATIC]


def test_a_layout_shows_the_best_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        KINDS[0]: {"int4:gptq": {DITHERED: Quality(kl=0.15)}, "int4:imatrix": {DITHERED: Quality(kl=0.3)}},
        KINDS[1]: {"AutoRound 20": {DITHERED: Quality(kl=0.2)}, "llm-compressor RTN": {DITHERED: Quality(kl=0.5)}},
    }
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows[kind])
    lines = quality.layouts().splitlines()
    calibrated = "| INT4 in blocks of 64, calibrated | `int4:gptq` 0.1500 | `AutoRound 20` 0.2000 | 25 % |"
    assert f"{calibrated} `int4:imatrix` 0.3000 | -50 % |" in lines
    assert "| INT4 in blocks of 64, no data | not measured | `llm-compressor RTN` 0.5000 |  |  |  |" in lines
    rows[KINDS[0]] |= {"int4:gptq --samples 32": {DITHERED: Quality(kl=0.16)}}
    assert f"{calibrated} `int4:gptq --samples 32` 0.1600 | 20 % |" in quality.layouts().splitlines()


def test_no_other_program_is_more_than_3_percent_ahead_on_the_same_rows_of_calibration() -> None:
    from benchmarks.evaluation.peers import PEERS

    found = {kind: read_quality(kind) for kind in KINDS}
    for layout, ours, theirs in quality.LAYOUTS:
        assert set(theirs) <= set(PEERS) and {name.split()[0] for name in ours} <= set(scheme_names())
        if "calibrated" in layout:
            same = quality.on_same_rows(ours)
            assert quality._first(found[KINDS[0]], same)[0] <= 1.03 * quality._first(found[KINDS[1]], theirs)[0], layout


def test_tasks_rank_rows_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        name: {DITHERED: Quality(kl=kl, accuracy=accuracy)} for name, kl, accuracy in (("a", 0.1, 0.5), ("b", 0.2, 0.6))
    }
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows if kind == KINDS[0] else {})
    assert [line.split("|")[5:7] for line in quality.tasks().splitlines()[2:]] == [[" 1 ", " 2 "], [" 2 ", " 1 "]]


def test_reports_are_held_against_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        PLAIN: {DITHERED: Quality(kl=0.0, perplexity=20.0)},
        "fp8": {DITHERED: Quality(kl=0.25, perplexity=22.0, agreement=0.9, reported=0.125)},
    }
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows if kind == KINDS[0] else {})
    assert "| 0.1250 | 0.0953 | 0.2500 |" in quality.reports()


def test_figures_of_the_older_reader_have_a_mark_and_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {PLAIN: {model: Quality(kl=0.0, perplexity=20.0) for model in quality.SMALL}}
    rows["fp8"] = {"tiny-llama": Quality(bits=8.0, kl=0.25, perplexity=22.0)}
    rows["int8"] = {"tiny-llama": Quality(bits=8.0, megabytes=2.8, kl=0.5, perplexity=23.0, agreement=0.9)}
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows if kind == KINDS[0] else {})
    lines = {line.split("`")[1]: line for line in quality.small().splitlines() if "`" in line}
    assert r"| 0.2500\* | 22.00 |" in lines["fp8"] and "| 0.5000 | 23.00 |" in lines["int8"]
    assert quality.small().count("the weights were decoded by the codecs of this package") == 1
    del rows["fp8"]
    assert "codecs" not in quality.small()


def test_programs_that_were_measured_on_an_example_alone_are_named_with_their_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_example = Quality(bits=4.125, megabytes=1.4, kl=0.25, perplexity=22.0, agreement=0.9)
    rows = {KINDS[0]: {"int4:rtn": {"tiny-llama": replace(on_example, kl=0.125)}}, KINDS[1]: {}}
    monkeypatch.setattr(quality, "read_quality", lambda kind=KINDS[0]: rows[kind])
    rows[KINDS[1]] = {"AutoRound 20": {"tiny-llama": on_example}, "GPTQ": {DITHERED: on_example}}
    said = quality.peers().splitlines()[-1]
    assert said == (
        "Measured on tiny-llama alone, by KL: `AutoRound 20` 0.2500 (4.12 bits); `int4:rtn` of `bridge` 0.1250 there."
    )


def test_the_best_rule_without_data_is_that_of_the_table() -> None:
    """By the geometric mean of KL over models, the given SmolLM2 left out, of schemes with the same weights."""
    found = read_quality()
    free = {name: one for name in scheme_names() if not (one := load_scheme(name)).needs_calibration and not one.only}
    for path in table_files("rules"):
        if not (best := without_data(path)):
            continue
        scheme = free[best]
        like = {name for name, one in free.items() if layout(one) == layout(scheme)}
        if like == {best}:
            continue  # there is nothing to choose
        models = [model for model in LANGUAGE if model != GIVEN and found[best].get(model, Quality()).kl is not None]
        assert DITHERED in models, f"{best} was not measured on the real model"
        kls = {name: [found.get(name, {}).get(model, Quality()).kl for model in models] for name in like}
        means = {name: geometric_mean(each) for name, each in kls.items() if None not in each}
        assert len(means) > 1 and means[best] == pytest.approx(min(means.values())), (best, models, means)


def layout(scheme: Scheme) -> tuple[Any, ...]:
    return (*(replace(one, search="") for one in scheme.weight), scheme.input, scheme.algorithm, scheme.rounding)


def test_what_is_picked_is_a_scheme_and_says_its_figures() -> None:
    assert {name for _, name, _ in quality.PICKS} <= set(scheme_names())
    assert f"| {quality.kl_words('int8_wo')} |" in quality.picks()


@pytest.mark.slow
def test_the_best_of_a_program_is_loaded_by_it_and_has_the_least_divergence() -> None:
    by_name = {f"`{runtime.name}`": runtime for runtime in runtimes()}
    for line in quality.best().splitlines()[2:]:
        program, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell in filter(None, cells):
            name = cell.partition("`")[2].partition("`")[0]
            assert any(not of.lacks(load_scheme(name).formats) for of in by_name[program].contracts)
            assert cell.endswith(f" {quality.kl_words(name)}")
    assert "[`nvfp4_wo:mse`](nvfp4_wo-mse.md)" in next(line for line in quality.best().splitlines() if "`vllm`" in line)
