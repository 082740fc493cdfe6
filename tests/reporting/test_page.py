"""The page of a report: whole, self-contained, escaped; plots that any numbers fit; nothing drawn without bound."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

from bridge.reporting.labels import box_of
from bridge.reporting.page import render
from bridge.reporting.plots import MAX_MARKS, experts_plot, parity_plots, scales_plot, short, storage_plot
from bridge.reporting.report import Advice, Coverage
from bridge.verification.parity import Parity, ScaleRange
from tests.cli.test_show import full, report, tensor


class Page(HTMLParser):
    """Tags that stay open, and everything a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.fetched += [value for value in named if not value.startswith("#")]
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe") else []
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_fetches_nothing_and_escapes_names() -> None:
    page = Page()
    page.feed(render(report()))
    assert (page.open, page.fetched) == ([], [])
    assert "head<b>.weight" in page.text
    for words in ("283.25", "why & how", "zero: floor", "one note", "2.13.0", "FAILED"):
        assert words in page.text


def test_the_page_plots_every_tensor_and_marks_those_below() -> None:
    page = render(report())
    assert page.count("<rect x=") == 2 * 5 + 1
    assert page.count('<rect class="low" x=') == 2
    assert page.count("<title>layers.2.up.weight: ") == 2 and page.count("FAILED</title>") == 2


def test_equal_reports_make_equal_pages() -> None:
    assert render(report()) == render(report())
    assert render(report()) != render(report(scheme="int8"))


def test_numbers_that_are_not_finite_do_not_break_the_plots() -> None:
    parity = Parity((tensor("a.weight", float("inf")), tensor("b.weight", -3.0)), layers=(("a", float("nan")),))
    page = render(report(parity=parity))
    assert not re.search(r'(?:x|y|width|height)="(?:nan|inf|-inf)"', page)


def test_a_page_without_comparison_says_so() -> None:
    assert "not compared" in render(report(parity=Parity()))


def test_the_page_shows_each_kind_of_fact() -> None:
    page = Page()
    page.feed(render(full()))
    for words in (
        "accounted", "48", "FAILS", "FAILED", "layers.0.experts.1.", "9.60", "2^-3", "18", "7, 3", "here",
        'modules = [\n    "layers.0.q",\n    "layers.0.k",\n]', "50% of the summed squares", "4.1 kB",
    ):  # fmt: skip
        assert words in page.text, words


def test_the_page_begins_with_what_a_reader_asks_first() -> None:
    """Verdict and figures, then the worst layers by name, then what runs it; gates are lines with their value."""
    layers = tuple((f"layers.{n}.up", 0.09 - n / 100) for n in range(8))
    tensors = tuple(dataclasses.replace(tensor(f"layers.{n}.up.weight"), gate=0.99) for n in range(3))
    parity = Parity(tensors, report().parity.outputs, layers)
    page = Page()
    page.feed(body := render(report(parity=parity, next="vllm serve {out}")))
    assert page.text.index("passed") < page.text.index("Perplexity") < page.text.index("Worst layers")
    titles = ["Outputs and perplexity", "Worst layers", "What runs it", "Parity by layer", "Provenance"]
    places = [page.text.rindex(title) for title in titles]  # the first time is in the list of sections
    assert places == sorted(places)
    assert "vllm serve out" in page.text[places[2] : places[3]]
    worst = page.text[places[1] : places[2]]
    assert [name for name, _ in layers if name in worst] == [name for name, _ in layers[:5]]
    assert body.count('class="gate"') == 1 and "gate 0.99" in page.text


def test_no_section_is_empty_and_every_link_leads_to_one() -> None:
    for made in (full(), report(), report(parity=Parity(), quantized=0)):
        page = render(made)
        links, ids = re.findall(r'href="#(\w+)"', page), re.findall(r' id="(\w+)"', page)
        assert set(links) <= set(ids) and len(ids) == len(set(ids))
        for section in re.findall(r"<section.*?</section>", page, re.DOTALL):
            assert re.search(r"<(p|table|svg)\b", section), section


def test_the_page_says_where_nothing_stands_out() -> None:
    assert "No layer stands out" in render(report())
    advised = render(report(advice=(Advice(("layers.1.up",), 0.5, 0.75, 10),)))
    assert "No layer stands out" not in advised and "75%" in advised


def test_a_deep_model_is_drawn_with_a_bounded_number_of_marks() -> None:
    deep = Parity(tuple(tensor(f"layers.{n}.{kind}.weight", 30 + n % 7) for n in range(900) for kind in "abcdef"))
    for plot in parity_plots(deep):
        assert len(plot.marks) == 900 <= MAX_MARKS
        assert "900 of 5,400 weights" in plot.about
    wide = [Coverage(f"layers.{n}.experts", tuple(range(256))) for n in range(60)]
    drawn = experts_plot(wide)
    assert drawn and len(drawn.marks) <= MAX_MARKS and "60 experts got no token" in drawn.about


def test_of_more_weights_than_are_drawn_the_failed_one_is() -> None:
    deep = tuple(tensor(f"layers.{n}.{kind}.weight", 30, (n, kind) != (444, "c")) for n in range(900) for kind in "abc")
    for plot in parity_plots(Parity(deep)):
        assert [mark.text.split(":")[0] for mark in plot.marks if mark.kind == "low"] == ["layers.444.c.weight"]


def test_what_lost_nothing_or_everything_does_not_stretch_the_axis() -> None:
    tensors = (
        tensor("layers.0.a.weight", 30),
        tensor("layers.0.b.weight", 999),
        tensor("layers.0.c.weight", -999, False),
    )
    plot = parity_plots(Parity(tensors))[0]
    assert {word.text for word in plot.words} >= {"30", "31"} and "from 30.00 to 30.00" in plot.about
    assert [mark.text.partition(": ")[2] for mark in plot.marks] == [
        "30.00", "nothing lost", "nothing left, FAILED",
    ]  # fmt: skip


def test_marks_lie_inside_their_plot() -> None:
    ranges = [ScaleRange(f"layers.{{}}.{kind}", 10, low, (1, 10**6, 3)) for low, kind in enumerate("abc", -9)]
    layers = [Coverage("layers.0.experts", (0, 7, 10**6))]
    plots = [
        scales_plot(ranges),
        experts_plot(layers),
        storage_plot(full().storage),
        *parity_plots(full().parity),
    ]
    for plot in plots:
        assert plot and plot.marks
        for mark in plot.marks:
            x, y, width, height = map(float, (mark.x, mark.y, mark.width, mark.height))
            assert -5 <= x <= x + width <= plot.width and -5 <= y <= y + height <= plot.height, mark


def test_a_plot_of_nothing_is_none() -> None:
    assert (storage_plot([]), scales_plot([]), experts_plot([]), parity_plots(Parity())) == (None, None, None, [])


def test_a_name_too_long_for_its_place_keeps_its_end() -> None:
    assert short("a" * 40 + ".self_attn.q_proj.weight").endswith("aaa.self_attn.q_proj.weight")
    assert len(short("a" * 400)) == 52 == len(short("a" * 52))


def test_a_hostile_path_is_escaped_everywhere() -> None:
    name = "x</title><script>alert(1)</script>"
    page = render(dataclasses.replace(full(), out=f"out/{name}", made_from={"source": name}, notes=(name,)))
    assert "<script" not in page


def test_names_of_a_plot_lie_beside_its_points() -> None:
    """Five names stood 17 pixels under their points, also on other points and on each other."""
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.o_proj")
    for spread in (0.0, 0.05, 0.5, 5.0):
        tensors = tuple(
            dataclasses.replace(tensor(f"layers.{n}.{kind}.weight", 30 + spread * (n * 7 % 5) + spread * at), gate=0.99)
            for n in range(6)
            for at, kind in enumerate(kinds)
        )
        for plot in parity_plots(Parity(tensors)):
            names = [word for word in plot.words if "_proj" in word.text or "gate" in word.text]
            boxes = [box_of(word.text, word.x, word.y) for word in names]
            points = [(mark.x, mark.y, mark.x + mark.width, mark.y + mark.height) for mark in plot.marks]
            assert names or not spread, plot.title
            for at, one in enumerate(boxes):
                for other in (*points, *boxes[:at]):
                    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
                    assert apart, (names[at], other)


def test_the_header_names_the_source() -> None:
    for source, name in (("/home/me/tiny-llama", "tiny-llama"), ("org/name@main", "org/name")):
        page = Page()
        page.feed(render(report(made_from={"source": source})))
        assert f"Made from {name}. Target trt" in page.text and "Made from /home" not in page.text


def test_worst_layers_are_named_only_where_they_differ() -> None:
    """In FP8 all layers lose the same, and five of them were called the worst."""
    even = tuple(tensor(f"layers.{n}.up.weight", 31 + n / 10) for n in range(5))
    for parity in (Parity(even), Parity(even, layers=tuple((f"layers.{n}.up", 0.05) for n in range(5)))):
        assert "Worst layers" not in render(report(parity=parity))
    for worse in (tensor("layers.5.up.weight", 28), tensor("layers.5.up.weight", 31, passed=False)):
        assert "Worst layers" in render(report(parity=Parity((*even, worse))))
