"""`qbridge cache`: list and clear the user's cache."""

from __future__ import annotations

import time

from bridge.cli.terminal import Terminal
from bridge.cli.verb import no_bars, verb

AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))  # seconds of each


@verb("qbridge cache --clear", "clear json debug", quiet=no_bars)
def cache(terminal: Terminal, clear: bool) -> None:
    """List the graphs, structures and kernels that are kept.

    They lie in $XDG_CACHE_HOME/qbridge, or ~/.cache/qbridge, and depend on no weight. A file is used only if the same
    code made it for the same config and kind of machine. `key` tells files apart that are of models with one name.
    """
    from bridge.core.output import cache
    from bridge.core.text import number, size
    from bridge.reporting.columns import Columns

    entries = cache.clear() if clear else cache.entries()
    if terminal.json:
        keys = ("kind", "what", "key", "bytes", "used", "path")
        rows = [{key: getattr(entry, key) for key in keys} for entry in entries]
        terminal.print_json({"removed": rows} if clear else rows)
        return
    if entries and not clear:
        now = time.time()
        table = [(cache.KINDS[e.kind], e.what, e.key, size(e.bytes), age(now - e.used)) for e in entries]
        terminal.print(Columns(("kept", "of", "key", "size", "last used"), table, (3,), wrap=False), "")
    if not entries and (why := cache.why_disabled()):
        terminal.print(f"nothing is kept: {why}")
        return
    total = f"{number(len(entries), 'file')}, {size(sum(entry.bytes for entry in entries))}"
    terminal.print(f"{cache.directory('')}: {'removed ' if clear else ''}{total}")


def age(seconds: float) -> str:
    """How long ago something was: the largest unit that fits.

    >>> age(59), age(60), age(200_000)
    ('now', '1 minute ago', '2 days ago')
    """
    from bridge.core.text import number

    for unit, word in AGES:
        if seconds >= unit:
            return f"{number(int(seconds // unit), word)} ago"
    return "now"
