"""How a result shows itself in a console and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

MAX_ROWS = 40  # of the table in a notebook

Table = tuple[Sequence[str], Sequence[tuple[str, ...]]]  # columns, rows


class Displayed:
    """Base of results: a few lines as `repr`, the same lines and a table in a notebook."""

    def lines(self) -> list[str]:
        """The result in a few lines."""
        raise NotImplementedError

    def table(self) -> Table:
        """Its columns and rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        columns, rows = self.table()
        head = "<br>".join(map(html.escape, self.lines()))
        more = f"<p>and {len(rows) - MAX_ROWS:,} more rows</p>" if len(rows) > MAX_ROWS else ""
        body = "".join(_row("td", row) for row in rows[:MAX_ROWS])
        return f"<p>{head}</p><table><thead>{_row('th', columns)}</thead><tbody>{body}</tbody></table>{more}"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
