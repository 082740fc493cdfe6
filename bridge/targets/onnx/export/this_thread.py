"""Replace a function of a module for one thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


def for_this_thread(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """`function` for the thread that asks now, `original` for all others."""
    thread = threading.get_ident()

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
