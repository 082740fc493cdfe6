"""Our pages in Chromium: each fits, asks for nothing, is readable in light and dark and by keyboard."""

from __future__ import annotations

import base64
import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from tests.browser.inspections import INSPECTIONS
from tests.browser.reports import REPORTS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = {**REPORTS, **INSPECTIONS}
RAN = ("statistics", "beside")  # inspections that say no more than the made ones
SCHEMES, WIDTHS, HEIGHT = ("light", "dark"), (390, 1200), 900
CONTRAST = 4.5  # WCAG AA for text

# Each text with its colour, the colours under it from the innermost out, and what it says.
TEXTS = """
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement, box = element.getBoundingClientRect();
  if (!walk.currentNode.data.trim() || !box.width || ['title', 'desc'].includes(element.tagName)) continue;
  const under = [];
  for (let at = element; at; at = at.parentElement) under.push(getComputedStyle(at).backgroundColor);
  const style = getComputedStyle(element);
  const colour = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
  found.push([colour, under, walk.currentNode.data.trim().slice(0, 40)]);
}
return found;
"""
# A place in the document for each element that the Tab key should reach.
REACHABLE = """
const wanted = 'a[href], summary, button, input, select, textarea, [tabindex="0"]';
window.order = [...document.querySelectorAll(wanted)].filter(e => e.checkVisibility());
return window.order.length;
"""
# What a screen reader says of regions and plots: their label, or the texts that they refer to.
NAMES = """
const said = e => (e.getAttribute('aria-labelledby') || '').split(' ').filter(Boolean)
  .map(id => document.getElementById(id).textContent).join(' ');
return [...document.querySelectorAll('[role=region], nav, section, svg[role=img]')]
  .map(e => e.getAttribute('aria-label') || said(e));
"""
FOCUSED = "return [window.order.indexOf(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.product if name in RAN else ()) for name in PAGES]
)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of `PAGES`, made once."""
    return PAGES[request.param](tmp_path_factory.mktemp(request.param))


LOOKS = list(product(SCHEMES, WIDTHS))
EACH_ONCE = list(zip(SCHEMES, WIDTHS, strict=True))


@pytest.fixture(
    params=[pytest.param(look, marks=() if look in EACH_ONCE else pytest.mark.product) for look in LOOKS],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def seen(request: pytest.FixtureRequest, browser: Any, page: Path, screenshots: Path) -> Any:
    """The browser with the page open, in one scheme and width, and a screenshot of it written down."""
    scheme, width = request.param
    show(browser, page, scheme, width)
    (screenshots / f"{page.parent.name}-{scheme}-{width}.png").write_bytes(shot(browser))
    return browser


def show(browser: Any, page: Path, scheme: str, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for log in ("browser", "performance"):
        browser.get_log(log)  # what came before
    browser.get(page.as_uri())


def shot(browser: Any, height: int = 0) -> bytes:
    """A picture of the page, of its first `height` pixels if given."""
    width, whole = browser.execute_script("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
    clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(taken["data"])


def colour(text: str) -> tuple[float, ...]:
    """`rgb(1, 2, 3)` or `rgba(1, 2, 3, 0.5)` as red, green, blue and opacity."""
    parts = [float(part) for part in text[text.index("(") + 1 : -1].split(",")]
    return tuple(parts) if len(parts) == 4 else (*parts, 1.0)


def luminance(rgb: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, under: list[str]) -> float:
    ground = next(c for c in (*map(colour, under), (255.0, 255.0, 255.0, 1.0)) if c[3] == 1)
    light, dark = sorted((luminance(colour(front)), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_page_fits_its_window(seen: Any) -> None:
    wide, window = seen.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert wide <= window


def test_what_is_wider_than_a_phone_scrolls_and_says_so(browser: Any, page: Path) -> None:
    """A shadow at the edge shows that a table goes on; it lies behind the text and moves with the scroll."""
    show(browser, page, "light", 390)
    wide = browser.execute_script(
        "return [...document.querySelectorAll('main *')]"
        ".filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1)"
        ".map(e => [e.tagName, getComputedStyle(e).overflowX, getComputedStyle(e).backgroundImage])"
    )
    bad = [entry for entry in wide if entry[1] != "auto" or entry[2].count("linear-gradient") != 4]
    assert wide and bad == []


def test_captions_are_whole_on_a_phone(browser: Any, page: Path) -> None:
    """A caption was as wide as its table: on a phone its end was to the right of the window."""
    show(browser, page, "light", 390)
    cut = browser.execute_script(
        "const box = e => { const all = document.createRange(); all.selectNodeContents(e);"
        "  return all.getBoundingClientRect(); };"
        "return [...document.querySelectorAll('caption, figcaption')]"
        ".filter(e => box(e).width && (box(e).right > document.documentElement.clientWidth || box(e).left < 0))"
        ".map(e => e.textContent)"
    )
    assert cut == []


def test_words_of_a_plot_do_not_lie_on_its_points(browser: Any, page: Path) -> None:
    """By the boxes that the browser draws; discs and squares of the plots over layers."""
    show(browser, page, "light", 1200)
    covered = browser.execute_script(
        "const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && "
        "  a.top < b.bottom - 2 && b.top < a.bottom - 2;"
        "return [...document.querySelectorAll('section[aria-labelledby=parity] svg')].flatMap(svg => {"
        "  const points = [...svg.querySelectorAll('rect')].filter(r => r.getAttribute('width') <= 9)"
        "    .map(r => r.getBoundingClientRect());"
        "  return [...svg.querySelectorAll('text')].filter(t => points.some(p => over(t.getBoundingClientRect(), p)))"
        "    .map(t => t.textContent); });"
    )
    assert covered == []


def test_nothing_is_fetched_and_nothing_is_complained_about(seen: Any, page: Path) -> None:
    events = [json.loads(entry["message"])["message"] for entry in seen.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]
    assert seen.get_log("browser") == []
    assert seen.execute_script("return document.scripts.length") == 0


def test_every_text_stands_out_from_its_ground(seen: Any) -> None:
    texts = seen.execute_script(TEXTS)
    faint = {
        (said, round(contrast(front, under), 2)) for front, under, said in texts if contrast(front, under) < CONTRAST
    }
    assert len(texts) > 40
    assert faint == set()


def test_tab_reaches_everything_in_the_order_of_the_page_and_shows_where_it_is(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    show(browser, page, "light", 1200)
    count = browser.execute_script(REACHABLE)
    reached = []
    for _ in range(count):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.execute_script(FOCUSED))
    assert count > 10
    assert [at for at, _ in reached] == list(range(count))
    assert all(outline != "none" for _, outline in reached)


def test_the_keyboard_skips_to_the_content_and_opens_what_is_folded(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    show(browser, page, "light", 1200)
    ActionChains(browser).send_keys(Keys.TAB, Keys.ENTER).perform()
    assert browser.execute_script("return [document.activeElement.id, location.hash]") == ["main", "#main"]
    if not browser.execute_script("return document.querySelector('summary')"):
        return  # of a large inspection nothing is folded
    browser.execute_script("document.querySelector('summary').focus()")
    ActionChains(browser).send_keys(Keys.SPACE).perform()
    assert browser.execute_script("return document.querySelector('details').open") is True


def test_headings_descend_and_every_plot_and_table_says_what_it_is(browser: Any, page: Path) -> None:
    show(browser, page, "light", 1200)
    levels = browser.execute_script("return [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    landmarks = browser.execute_script(
        "return ['header','nav','main','footer'].map(t => document.querySelectorAll(t).length)"
    )
    assert landmarks == [1, 1, 1, 1]
    names = browser.execute_script(NAMES)
    assert len(names) > 5 and all(names)
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_a_printed_page_is_black_on_white_and_whole(browser: Any, page: Path) -> None:
    show(browser, page, "dark", 1200)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        ink, paper = browser.execute_script(
            "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        )
        assert contrast(ink, [paper]) > 20
        assert browser.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
