"""Count a function's work in calls, which no busy machine changes."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


def counted(function: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> tuple[Result, int]:
    """The result, and how many calls of Python and C functions it took."""
    profile = cProfile.Profile()
    result = profile.runcall(function, *args, **named)
    return result, sum(entry.callcount for entry in profile.getstats())
