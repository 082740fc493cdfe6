"""The built site: it asks the network for nothing, its links lead somewhere, and what should be on it is."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from bridge.quant.schemes.catalog import scheme_names
from docs.generate import api

pytestmark = pytest.mark.slow

COMPARED = (
    "NVIDIA/Model-Optimizer|vllm-project/llm-compressor|intel/auto-round|huggingface/optimum|huggingface/optimum-onnx|"
    "NVIDIA-NeMo/Megatron-Bridge"
)
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}


class Page(HTMLParser):
    """What a page loads, links to, and can be linked to by."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in LOADS and given.get(LOADS[tag]):
            self.loads.append(given[LOADS[tag]])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_no_page_and_no_style_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [name for name in page.loads if re.match(r"(?:[a-z]+:)?//", name)], path
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//", text), path


def test_every_link_leads_to_a_page_and_a_place_that_exist(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            address, place = urldefrag(link)
            if re.match(r"[a-z]+:", address) or path.name == "404.html":
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            there = pages.get(target)
            if not target.exists() or (place and there and unquote(place) not in there.anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, "\n".join(lost)


def test_links_to_elsewhere_are_sources_of_the_comparison(site: Path, pages: dict[Path, Page]) -> None:
    """They lead to repositories that are compared, and to a commit, so that what they show stays the same."""
    for path, page in pages.items():
        found = {link for link in page.links if link.startswith("http")}
        where = path.relative_to(site).as_posix()
        if where != "compare.html" and not where.startswith("coming-from/"):
            assert not found, (where, found)
        known = rf"https://github\.com/({COMPARED})(/(blob|tree)/[0-9a-f]{{40}}/.+)?"
        assert not [link for link in found if not re.fullmatch(known, link)], where


def test_every_scheme_and_public_name_has_its_place(site: Path, pages: dict[Path, Page]) -> None:
    assert all((site / "schemes" / f"{name.replace(':', '-')}.html").is_file() for name in scheme_names())
    for page, (_, _, names) in api.PAGES.items():
        anchors = pages[site / "reference" / f"{page}.html"].anchors
        assert all(api.home(name) in anchors for name in names)


def test_examples_of_docstrings_are_shown_as_code(site: Path) -> None:
    """Markdown takes a prompt for three quotations within each other."""
    for page in api.PAGES:
        text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        assert "<blockquote" not in text, page
    assert text.count('class="language-pycon') >= 5


def test_no_mark_is_left_on_a_page(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert "<!-- generated:" not in path.read_text(encoding="utf-8"), path


def test_no_path_of_the_machine_is_on_a_page(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/tmp/|/home/|/root/|site-packages", text), path


def test_the_search_knows_every_page_and_is_a_script(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert text.startswith("var __index = ")
    assert all(f'"location":"schemes/{name.replace(":", "-")}.html"' in text for name in scheme_names())
