"""Progress bars in terminals and notebooks."""

from __future__ import annotations

import functools
import html
import importlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from inspect import CO_VARKEYWORDS
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeVar, cast

from bridge.core.progress import BYTES, Progress, no_progress

if TYPE_CHECKING:
    from rich import progress as progress_module
    from rich.console import Console

REFRESH = 0.2  # seconds between two pictures of the bars in a notebook
EVERY = 30.0  # seconds between two lines in a log
P = ParamSpec("P")
T = TypeVar("T")


def shows_progress(verb: Callable[P, T]) -> Callable[P, T]:
    """Give a verb a callback as `progress`: the caller's own; bars if it is None; nothing if it is False."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_words(verb, kwargs)
        asked = kwargs.get("progress")
        if callable(asked) or asked is False or not is_interactive():
            return verb(*args, **kwargs)
        with nullcontext(NotebookBars()) if _in_notebook() else bars(sys.stderr, redirect=True) as callback:
            return verb(*args, **cast(Any, kwargs | {"progress": callback}))

    return run


def _check_words(verb: Callable[..., object], given: Collection[str]) -> None:
    """TypeError, with the nearest argument, for a word that a verb without options does not take."""
    code: Any = getattr(verb, "__code__", None)
    if code is None or code.co_flags & CO_VARKEYWORDS:
        return
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if unknown := [word for word in given if word not in known]:
        import difflib

        near = "".join(f"; nearest: {word}" for word in difflib.get_close_matches(unknown[0], known, 1))
        raise TypeError(f"{verb.__name__}() has no argument {unknown[0]!r}; known: {', '.join(known)}{near}")


def callback_of(progress: Progress | bool | None) -> Progress:
    """The callback that a verb was given; one that does nothing if it was given none."""
    return progress if callable(progress) else no_progress


def is_interactive() -> bool:
    """Whether someone watches: a terminal or a notebook."""
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def console(stream: TextIO) -> Console:
    """A console on `stream`: as wide as the terminal; in a pipe or file as wide as the content."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process via stdout, which is redirected while a verb runs

    width = None if stream.isatty() else 1000
    return Plain(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def bars(stream: TextIO, redirect: bool = False) -> Iterator[Progress]:
    """Bars on `stream` while the block runs, one per text; `redirect`: what else is printed goes above them."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns, console=console(stream), transient=True, redirect_stdout=False, redirect_stderr=redirect
    ) as shown:
        yield Bars(shown)


class Bars:
    """One bar per text. Several threads call it at once: the graph is made while the weights stream."""

    def __init__(self, bars: progress_module.Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, progress_module.TaskID] = {}
        self.unbounded: str | None = None
        self.lock = threading.Lock()

    def __call__(self, done: int, total: int, text: str) -> None:
        with self.lock:
            if text not in self.tasks:
                self.tasks[text] = self.bars.add_task(text, total=total or None, rate="")
            if total:
                task = self.tasks[text]
                elapsed = self.bars.tasks[task].elapsed
                rate = f"{done / elapsed / 1e6:,.0f} MB/s" if text in BYTES and elapsed else ""
                self.bars.update(task, completed=done, total=total, rate=rate)
            elif self.unbounded != text:  # work of unknown length ends when the next such work begins
                if self.unbounded is not None:
                    self.bars.update(self.tasks[self.unbounded], completed=1, total=1)
                self.unbounded = text


class NotebookBars:
    """One line per text in the output of a cell. rich's own bars need ipywidgets there."""

    def __init__(self) -> None:
        ipython: Any = importlib.import_module("IPython.display")  # has no types
        self._html, self._handle = ipython.HTML, ipython.display(ipython.HTML(""), display_id=True)
        self._texts: dict[str, tuple[int, int]] = {}
        self._last = 0.0
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int, text: str) -> None:
        with self._lock:
            for other, (_, length) in self._texts.items():  # work of unknown length ends when other work begins
                if other != text and not length:
                    self._texts[other] = (1, 1)
            self._texts[text] = (done, total)
            now = time.monotonic()
            if now - self._last < REFRESH and done < total:
                return
            self._last = now
            self._handle.update(self._html("<br>".join(map(_bar, self._texts, self._texts.values()))))


class LogLines:
    """A line every half minute, for logs: the work that runs, and how much of it is done."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            if text and now - self._last >= EVERY:
                self._last = now
                self._write(f"{text} {done / total:.0%}\n" if total else f"{text}\n")


def _bar(text: str, state: tuple[int, int]) -> str:
    done, total = state
    value, share = (f'value="{done}" max="{total}"', f"{done / total:.0%}") if total else ("", "")
    return f"<progress {value}></progress> {html.escape(text)} {share}"


def is_bars(progress: Progress) -> bool:
    """Whether a callback draws a bar per text."""
    return isinstance(progress, Bars | NotebookBars)
