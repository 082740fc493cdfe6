"""English text that no calibration has seen, and text to calibrate on, from one wheel.

gensim's wheel (LGPL 2.1) brings, for its tests, an excerpt of the English Wikipedia (CC BY-SA 3.0, its authors) and the
Lee news corpus (texts of the Australian Broadcasting Corporation). Nothing of it is part of this project: the wheel is
downloaded once into a build directory. Odd articles and news 0..149 calibrate, the even articles and the other news
evaluate.
"""

from __future__ import annotations

import bz2
import html
import json
import random
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHEEL = "gensim==4.4.0"
WIKIPEDIA = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
NEWS = "gensim/test/test_data/lee_background.cor"
ARTICLE = 2000  # characters that an article has at least; shorter pages are redirects
WINDOWS, TOKENS = 8, 512


@dataclass(frozen=True)
class Text:
    """Documents: some to calibrate on, and articles and news to evaluate on."""

    calibration: tuple[str, ...]
    articles: tuple[str, ...]
    news: tuple[str, ...]


def read_text(build: Path) -> Text:
    """Split the wheel's documents; it is downloaded if `build` has none."""
    wheels = list(build.glob("gensim-*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(build), WHEEL]
        subprocess.run(command, check=True)
        wheels = list(build.glob("gensim-*.whl"))
    with zipfile.ZipFile(wheels[0]) as wheel:
        pages = re.findall(r"<text[^>]*>(.*?)</text>", bz2.decompress(wheel.read(WIKIPEDIA)).decode(), re.DOTALL)
        news = wheel.read(NEWS).decode().splitlines()
    articles = [plain(page) for page in pages if len(page) > ARTICLE]
    calibration = [*articles[1::2], *news[:150]]
    random.Random(0).shuffle(calibration)
    return Text(tuple(calibration), tuple(articles[::2]), tuple(news[150:]))


def plain(page: str) -> str:
    """The prose of a page of Wikipedia, a paragraph a line; templates, tables, references and lists left out."""
    text = html.unescape(html.unescape(page))
    text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>", "", text, flags=re.DOTALL)
    for pattern in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*?\|\}", r"\[\[(?:File|Image|Category):[^\[\]]*\]\]"):
        before = ""
        while before != text:
            before, text = text, re.sub(pattern, "", text, flags=re.DOTALL)
        text = re.sub(r"\[\[(?!(?:File|Image|Category):)(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S*\s?([^\]]*)\]|<[^>]*>|'{2,}", r"\1", text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if len(line) > 80 and line[0] not in "*#:;|!={}[")


def write_calibration(text: Text, path: Path, draw: int = 0) -> None:
    """The records that bridge and its peers calibrate on, one JSON object a line; each draw has another order."""
    documents = list(text.calibration)
    if draw:
        random.Random(draw).shuffle(documents)
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")


def windows(text: Text, tokenizer: Any, count: int = WINDOWS, length: int = TOKENS) -> list[list[int]]:
    """Token ids, half of the windows of articles and half of news, at even distances in each."""
    found: list[list[int]] = []
    for documents in (text.articles, text.news):
        ids: list[int] = tokenizer("\n".join(documents), add_special_tokens=False)["input_ids"]
        apart, each = len(ids) // (count // 2), range(count // 2)
        assert apart >= length, f"{len(ids)} tokens are too few for {count // 2} windows of {length}"
        found += [ids[at * apart : at * apart + length] for at in each]
    return found
