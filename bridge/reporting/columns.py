"""Lines and tables for terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

LABEL = 9  # width of a line's label
# Words that say how something ended, and their colour; a terminal without colours and NO_COLOR show none.
COLOURS = {"passed": "green", "done": "green", "FAILED": "bold red", "BROKEN": "bold red"}


def line(label: str, text: str) -> Text:
    """A labelled line, which is never wrapped: a user copies paths and commands from it."""
    from rich.text import Text

    return Text(f"{label:<{LABEL}}", no_wrap=True, overflow="ignore").append_text(coloured(text))


def coloured(text: str, at: int = 0) -> Text:
    """A text whose word at this place is in colour, if it says how something ended."""
    from rich.text import Text

    word = text[at:].partition(":")[0].partition(" ")[0]
    result = Text(text, no_wrap=True, overflow="ignore")
    result.stylize(COLOURS.get(word, ""), at, at + len(word))
    return result


def titled_table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()
) -> list[RenderableType]:
    """A title and its table; nothing if there are no rows."""
    return ["", title, Columns(columns, rows, right)] if rows else []


@dataclass(frozen=True)
class Columns:
    """A table without rules. If it is too wide, the first cell of a row gets a line of its own, else each cell.

    rich's own table takes 2.2 s for the 2,900 tensors of a 405 B model, this one 0.02 s. `wrap=False`: every row is
    one line, however wide.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    right: Sequence[int] = ()
    wrap: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        cells = [tuple(self.columns)]
        for row in self.rows:
            cells += zip_longest(*(cell.split("\n") for cell in row), fillvalue="")  # a cell may have several lines
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        first = widths[0]
        if self.wrap and _width(widths) > options.max_width:
            widths[0] = first = 4
            if len(widths) < 3 or _width(widths) > options.max_width:
                yield from self._records(options.max_width)
                return
        for row in cells:
            if len(row[0]) > first:
                yield from _segments(f"  {row[0]}")
                row = ("", *row[1:])
            padded = zip(row, widths, range(len(widths)), strict=True)
            yield from _segments("", *(cell.rjust(w) if i in self.right else cell.ljust(w) for cell, w, i in padded))

    def _records(self, width: int) -> Iterator[Segment]:
        """Each row as lines of `column  cell`; long sentences are wrapped between words, names never."""
        label = max(map(len, self.columns)) + 2
        for at, row in enumerate(self.rows):
            if at:
                yield from _segments("")
            for column, cell in zip(self.columns, row, strict=True):
                lines = [
                    part
                    for text in cell.split("\n")
                    for part in textwrap.wrap(
                        text, max(width - label - 2, 20), break_long_words=False, break_on_hyphens=False
                    )
                ]
                for number, text in enumerate(lines):
                    yield from _segments(f"  {'' if number else column:<{label}}{text}")


@dataclass(frozen=True)
class Labelled:
    """Labelled lines; sentences are wrapped between words where the terminal is narrow, names never."""

    rows: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        width = max(options.max_width - LABEL, 20)
        for label, text in self.rows:
            for number, part in enumerate(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)):
                yield from _segments(f"{'' if number else label:<{LABEL}}{part}")


def _segments(*cells: str) -> Iterator[Segment]:
    """One line of cells, in colour if a cell says how something ended."""
    from rich.segment import Segment
    from rich.style import Style

    text = "  ".join(cells).rstrip()
    for cell in cells[1:]:
        if colour := COLOURS.get(word := cell.strip().partition(" ")[0]):
            before, _, after = text.rpartition(cell.strip())
            after = f"{cell.strip().removeprefix(word)}{after}\n"
            yield from (Segment(before), Segment(word, Style.parse(colour)), Segment(after))
            return
    yield Segment(f"{text}\n")


def _width(columns: Sequence[int]) -> int:
    return sum(columns) + 2 * len(columns)
