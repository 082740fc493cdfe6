"""Threads that read models and threads that fetch for them.

No exit and no reader waits for a stalled server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from bridge.core.errors import SourceError

GIVEN_UP = "reading was given up"
POLL = 0.1  # seconds between looks at whether reading was given up

T = TypeVar("T")


def start(call: Callable[[], T]) -> Future[T]:
    """Call it in a daemon thread of its own: an exit joins the threads of a `ThreadPoolExecutor`, but not these."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="remote_fetch", daemon=True).start()
    return future


def result(future: Future[T], given_up: threading.Event, where: str) -> T:
    """The result of `start`; SourceError as soon as reading is given up."""
    while not future.done():
        if given_up.is_set():
            raise SourceError(f"{where}: {GIVEN_UP}")
        wait([future], POLL)
    return future.result()


@contextmanager
def readers(count: int, *read: object, name: str = "") -> Iterator[ThreadPoolExecutor]:
    """Threads that read models (sources or directories); after an error, none waits for a remote file any more."""
    roots = [getattr(model, "root", model) for model in read]
    events = [tree.store.given_up for root in roots if (tree := getattr(root, "tree", None))]  # of a `RemotePath`
    try:
        with ThreadPoolExecutor(count, thread_name_prefix=name) as pool:
            try:
                yield pool
            except BaseException:
                for given_up in events:
                    given_up.set()
                raise
    finally:
        for given_up in events:
            given_up.clear()
