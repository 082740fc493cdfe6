"""The documentation in Chromium, opened from the disk: it fits, asks the network for nothing, is readable, searches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_report import CONTRAST, LOOKS, TEXTS, contrast, shot, show
from tests.covering import grid
from tests.docs.site import built

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = (
    "index", "concepts", "guides/batch", "schemes/fp8", "targets/trt", "adding/source", "guarantees/security",
    "reference/errors", "reference/command-line", "reference/verbs", "guides/serve", "guides/gpu", "support",
    "performance", "coming-from/modelopt",
)  # fmt: skip
# The texts of the part that is ours; the theme's own hide and show as it likes.
ARTICLE = TEXTS.replace("document.body", "document.querySelector('article')")
# Of each table, its columns' width and what its window shows.
WIDE = """return [...document.querySelectorAll('article .md-typeset__scrollwrap')]
    .map(wrap => [wrap.scrollWidth, wrap.clientWidth, wrap.textContent.trim().slice(0, 40)])"""
RESULTS = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


# Every page once, and every scheme of every width.
every_page = grid({"name": PAGES, "look": LOOKS}, shows=lambda name, look: {name, look}, indirect=["look"])


@pytest.fixture
def look(request: pytest.FixtureRequest, browser: Any, site: Path, screenshots: Path) -> Callable[[str], Any]:
    """Opens a page in one scheme and width, and writes a screenshot of it down."""
    scheme, width = request.param

    def looked(name: str) -> Any:
        show(browser, site / f"{name}.html", scheme, width)
        picture = screenshots / f"site-{name.replace('/', '-')}-{scheme}-{width}.png"
        picture.write_bytes(shot(browser))
        return browser

    return looked


@every_page
def test_a_page_fits_its_window(look: Callable[[str], Any], name: str) -> None:
    script = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    wide, window = look(name).execute_script(script)
    assert wide <= window


def test_every_column_of_the_matrix_is_seen_on_a_laptop(browser: Any, site: Path) -> None:
    show(browser, site / "support.html", "light", 1366)
    tables = browser.execute_script(WIDE)
    assert tables and [table for table in tables if table[0] > table[1]] == []


def test_the_landing_page_has_a_picture(browser: Any, site: Path) -> None:
    show(browser, site / "index.html", "light", 1366)
    (width,) = browser.execute_script("return [...document.querySelectorAll('img.shot')].map(img => img.naturalWidth)")
    assert width == 1100


def test_tables_of_the_site_show_on_a_phone_that_they_scroll(browser: Any, site: Path) -> None:
    show(browser, site / "guides/gpu.html", "light", 390)
    script = "return getComputedStyle(document.querySelector('.md-typeset__scrollwrap')).backgroundImage"
    assert browser.execute_script(script).count("linear-gradient") == 4
    assert any(table[0] > table[1] for table in browser.execute_script(WIDE))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_files_of_the_site_alone_and_complains_of_nothing(browser: Any, site: Path, name: str) -> None:
    show(browser, site / f"{name}.html", "light", 1200)
    time.sleep(0.5)  # what scripts fetch once they run
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert asked and all(url.startswith((site.as_uri(), "data:", "about:")) for url in asked), asked
    assert browser.get_log("browser") == []


@every_page
def test_every_text_of_a_page_stands_out_from_its_ground(look: Callable[[str], Any], name: str) -> None:
    texts = look(name).execute_script(ARTICLE)
    faint = {(said, front, round(contrast(front, under), 2)) for front, under, said in texts}
    assert len(texts) > 10
    assert not {entry for entry in faint if entry[2] < CONTRAST}


@pytest.mark.parametrize(
    ("words", "page"), [("w4a8_awq", "schemes/w4a8_awq.html"), ("journal", "guarantees/faults.html")]
)
def test_the_search_finds_pages_without_a_server(browser: Any, site: Path, words: str, page: str) -> None:
    from selenium.webdriver import ActionChains

    show(browser, site / "index.html", "light", 1200)
    browser.find_element("css selector", ".md-search__input").click()
    ActionChains(browser).send_keys(words).perform()
    found: list[str] = []
    for _ in range(100):
        found = browser.execute_script(RESULTS)
        if found:
            break
        time.sleep(0.1)
    assert any(page in link for link in found), found
