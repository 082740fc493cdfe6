"""The page of an inspection: what it says, its size, and that nothing depends on colour."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from bridge.reporting.page import Page, Section, html_of  # noqa: E402
from bridge.tracker import Cost, NotFinite  # noqa: E402
from bridge.workflows.inspect.page import page_of, render  # noqa: E402
from bridge.workflows.inspect.page.over_steps import POINTS  # noqa: E402
from bridge.workflows.inspect.result import CodeRange, Inspection, Magnitudes, Record  # noqa: E402
from bridge.workflows.inspect.side_by_side import Compared, Difference  # noqa: E402
from tests.browser.inspections import KINDS, SCHEMES, large  # noqa: E402

LIMIT = 300_000  # bytes of a page of 32 layers x 7 kinds x 4 schemes


def sections(seen: Inspection | Page) -> dict[str, Section]:
    page = page_of(seen) if isinstance(seen, Inspection) else seen
    return {section.id: section for section in page.sections}


@pytest.fixture(scope="module")
def big() -> Page:
    return page_of(large())


def test_the_page_of_a_large_model_is_small_and_equal_each_time(big: Page) -> None:
    page = html_of(big)
    print(f"32 layers x {len(KINDS)} kinds x {len(SCHEMES)} schemes, activation and weight: {len(page):,} bytes")
    assert len(page.encode()) < LIMIT
    assert page == render(large())
    assert "<script" not in page


def test_every_mark_and_every_line_has_a_text(big: Page) -> None:
    page = html_of(big)
    marks = re.findall(r"<rect[^>]*[^/]>(<title>[^<]+</title></rect>)?", page)  # those of keys have no content
    assert len(marks) > 2000 and all(marks)
    assert len(re.findall(r"<polyline[^>]*><title>[^<]+</title>", page)) == page.count("<polyline") > 0
    for plot in (plot for section in big.sections for plot in section.plots):
        assert all(mark.text and math.isfinite(mark.x + mark.y) and mark.width > 0 for mark in plot.marks)
        assert all(mark.x >= 0 and mark.x + mark.width <= plot.width + 1 for mark in plot.marks)
        assert all(mark.y >= 0 and mark.y + mark.height <= plot.height for mark in plot.marks)


def test_a_grid_has_a_row_a_kind_and_a_column_a_layer(big: Page) -> None:
    plots = sections(big)["grid"].plots
    assert [plot.title for plot in plots] == [f"{s} {tensor}" for tensor in ("activation", "weight") for s in SCHEMES]
    assert len(plots[0].marks) == 32 * 7
    assert {word.text for word in plots[0].words} >= {*KINDS, "0", "30"}
    low = [mark for mark in plots[0].marks if mark.kind == "low"]
    assert any(mark.text == "mlp.down, layer 3: not finite" for mark in low)
    assert "correlated by 0.75 (int8_sq), 0.54 (fp8) and -0.23 (int4_wo)" in sections(big)["grid"].words[0]


def test_the_worst_of_several_experts_fills_a_cell() -> None:
    rows = [Record(0, f"layers.2.experts.{n}.up", "", "weight", "fp8_sqnr", 30.0 - n) for n in range(3)]
    (plot,) = sections(Inspection({}, tuple(rows)))["grid"].plots
    assert [mark.text for mark in plot.marks] == ["layers.2.experts.2.up: 28.0 dB, worst of 3"]


def test_the_worst_is_that_of_all_steps() -> None:
    rows = tuple(Record(step, "a", "", "weight", "fp8_sqnr", value) for step, value in enumerate((30.0, 7.0, 20.0)))
    counted = tuple(Magnitudes(step, "a", "weight", ((0, step + 1),), 0) for step in range(3))
    seen = Inspection({}, rows, magnitudes=counted)
    assert [row[4] for row in sections(seen)["worst"].tables[0].rows] == ["7.0"] and seen.worst()[0].value == 7.0
    assert [mark.text for mark in sections(seen)["grid"].plots[0].marks] == ["a: 7.0 dB"]
    assert [plot.marks[0].text[:2] for plot in sections(seen)["magnitudes"].plots] == ["2 "]


def test_worst_tensors_are_those_of_each_scheme_with_their_reasons(big: Page) -> None:
    rows = sections(big)["worst"].tables[0].rows
    assert [row[3] for row in rows] == [scheme for scheme in SCHEMES for _ in range(5)]
    assert rows[0][:5] == ("model.layers.3.mlp.down_proj", "mlp.down", "activation", "fp8", "not finite")
    assert rows[0][5] == "NaN or infinity; outliers: amax 90 x p99.9; 12.5 % become zero"


def test_strips_say_what_becomes_zero_and_what_is_cut_off() -> None:
    ranges = (CodeRange("fp8", 0.25, 0.25), CodeRange("int8", 0.5, 2.0, 6.0), CodeRange("mxfp8", 1e-9, 1e-8))
    counted = Magnitudes(0, "a.0", "weight", ((-4, 10), (-1, 5), (2, 1)), 16, ranges)
    records = (
        Record(0, "a.0", "", "weight", "fp8_underflows%", 31.25),
        Record(0, "a.0", "", "weight", "int8_overflows%", 0.5),
        Record(0, "a.0", "", "weight", "int8_underflows%", 0.0),
    )
    (plot,) = sections(Inspection({}, records, magnitudes=(counted,)))["magnitudes"].plots
    assert plot.about == "32 values, 50.0% of them zero, from 2^-4 to 2^3."
    texts = [(mark.text, mark.kind) for mark in plot.marks]
    assert texts[:3] == [("10 from 2^-4 to 2^-3", "was"), ("5 from 2^-1 to 2^0", "was"), ("1 from 2^2 to 2^3", "was")]
    assert texts[3:] == [
        ("fp8: all below 0.25 become zero", "low"), ("fp8: kept", "ok"),
        ("int8: all below 0.5 become zero", "low"), ("int8: up to 2 zero in blocks with a large scale", "more"),
        ("int8: kept", "ok"), ("int8: above 6 cut off", "low"), ("mxfp8: kept", "ok"),
    ]  # fmt: skip
    words = {word.text for word in plot.words}
    assert {"31.2 % become zero", "0 % become zero, 0.5 % cut off"} <= words
    octave = plot.marks[0].width + 1
    assert plot.marks[3].width == pytest.approx(2 * octave)  # 2^-4 to 2^-2


def test_layers_that_read_one_tensor_share_a_plot() -> None:
    rows = tuple(Magnitudes(0, f"a.{n}", "activation", ((0, 4),), 0) for n in range(3))
    other = Magnitudes(0, "a.3", "activation", ((0, 5),), 0)
    plots = sections(Inspection({}, (), magnitudes=(*rows, other)))["magnitudes"].plots
    assert [plot.title for plot in plots] == ["activation of a.0", "activation of a.3"]


def test_lines_over_steps_are_those_of_what_moved() -> None:
    rows = []
    for step in range(100):
        rows += [
            Record(step, "layers.0.up", "mlp.up", "activation", "std", 1.0 + step),
            Record(step, "layers.1.up", "mlp.up", "activation", "std", 2.0),
            Record(step, "layers.0.up", "mlp.up", "activation", "numel", 64.0),
            Record(step, "layers.0.up", "mlp.up", "activation", "underflows%", 1e-4 * step),
        ]
    plots = sections(Inspection({}, tuple(rows)))["steps"].plots
    assert [plot.title for plot in plots] == ["std", "underflows%"]
    (path,) = plots[0].paths
    assert path.text == "activation, mlp.up, layer 0" and len(path.points) == len(plots[0].marks) <= POINTS + 1
    assert path.points[0][1] > path.points[-1][1] and plots[0].marks[-1].text.startswith("step 99: 100")
    assert "steps" not in sections(Inspection({}, tuple(rows[:4])))


def test_names_at_the_ends_of_lines_do_not_meet() -> None:
    rows = [
        Record(step, f"layers.{n}.up", "mlp.up", "activation", "std", step * (1 + n / 1000))
        for n in range(4)
        for step in (0, 1)
    ]
    (plot,) = sections(Inspection({}, tuple(rows)))["steps"].plots
    places = sorted(word.y for word in plot.words if word.text.startswith("activation"))
    assert len(places) == 4 and all(b - a >= 12 for a, b in pairwise(places))
    assert places[0] > 0 and places[-1] < plot.height


def test_costs_are_those_of_a_batch() -> None:
    root, inner = Cost("Model", 4, 0.8, 0.2, 1.6, 4000), Cost("layers.0", 8, 0.6, 0.6, 1.2, 2000)
    section = sections(Inspection({}, costs=(root, inner)))["costs"]
    assert [row[:5] for row in section.tables[0].rows] == [
        ("layers.0", "8", "150.00", "150.00", "300.00"),
        ("Model", "4", "50.00", "200.00", "400.00"),
    ]
    assert section.tables[1].rows[0] == ("layers.{}", "1", "75.0%")
    assert section.words[1] == "All modules together keep 1 kB for backward."


def test_the_first_nan_is_said_first() -> None:
    seen = Inspection({}, first_bad=NotFinite("layers.0", "backward", "NaN", "weight"))
    page = page_of(seen)
    assert page.sections[0].words == ["layers.0 makes NaN in backward: weight gets it as gradient."]
    assert (page.judged, page.verdict, page.passed) == ("Values", "not all are finite", False)


def test_matrices_alone_are_a_grid_by_role() -> None:
    bad, good = Difference(12.0, 0.9, 1.0), Difference(None, 1.0, 1.0)
    rows = (
        Compared("layers.0.up", "Linear", bad, bad, "mlp.up"), Compared("layers.0", "Block", bad, None),
        Compared("layers.1.up", "Linear", bad, good, "mlp.up"),
    )  # fmt: skip
    section = sections(Inspection({"against": "out"}, compared=rows))["compared"]
    assert [mark.text for mark in section.plots[1].marks] == ["mlp.up, layer 0: 12.0 dB"]
    assert section.tables[0].rows[0][:2] == ("layers.0.up", "mlp.up")
    assert any("not what that costs" in line for line in section.words)
