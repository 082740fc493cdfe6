"""The words of a `quantization_config`, held to their types: it is a stranger's; never guesses what one meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError

MOST = 1 << 31  # values of a block
LONGEST = 512  # characters of a pattern, and of a name that one is tried on
REPEATS = 4  # of any number that a pattern may have: trying one takes the length of the name to this power
_UNBOUNDED = 64


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """An object; empty where there is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "an object")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings; empty where there is none."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise _wrong(where, value, "a list of strings")
    return tuple(value)


def whole(value: Any, where: str, default: int) -> int:
    """A whole number."""
    if value is None:
        return default
    if type(value) is not int or abs(value) > MOST:
        raise _wrong(where, value, "a whole number")
    return value


def block(value: Any, where: str) -> tuple[int, ...]:
    """One or two sizes of a block."""
    sizes = [value] if type(value) is int else value
    if isinstance(sizes, str):
        sizes = [int(n) if n.isascii() and n.isdecimal() and len(n) < 10 else 0 for n in sizes.split("x")]
    if not isinstance(sizes, list | tuple) or len(sizes) not in (1, 2):
        raise _wrong(where, value, "one or two sizes")
    if not all(type(n) is int and 0 < n <= MOST for n in sizes):
        raise _wrong(where, value, "sizes above 0")
    return tuple(sizes)


def matches(pattern: str, name: str, where: str) -> bool:
    """Whether a regular expression of the file matches the beginning of `name`, as `re.match` has it.

    SourceError for one that could be tried without end: repeats within repeats, or too many.
    """
    if len(pattern) > LONGEST or len(name) > LONGEST:
        raise SourceError(f"{where}: a pattern or a name of more than {LONGEST} characters")
    try:
        found = re.compile(pattern)
        repeats = _repeats(re._parser.parse(pattern), False)  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError) as error:
        raise SourceError(f"{where}: {pattern[:80]!r} is no regular expression: {error}") from error
    if repeats > REPEATS:
        raise SourceError(
            f"{where}: {pattern[:80]!r} has repeats within repeats, or more than {REPEATS}, which may take for ever; "
            "name the modules instead"
        )
    return found.match(name) is not None


def _repeats(parsed: Any, inside: bool) -> int:
    """How many parts of a parsed pattern are repeated any number of times; more than allowed where one lies in one."""
    count = 0
    for op, given in parsed:
        word = str(op)
        if word in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = given
            unbounded = int(most) > _UNBOUNDED
            many = int(most) > 1
            count += REPEATS + 1 if inside and many else int(unbounded)
            count += _repeats(inner, inside or many)
        elif word == "SUBPATTERN":
            count += _repeats(given[-1], inside)
        elif word == "BRANCH":
            inner = [_repeats(branch, inside) for branch in given[1]]
            count += REPEATS + 1 if inside and len(inner) > 1 else sum(inner)
        elif word in ("ASSERT", "ASSERT_NOT"):
            count += _repeats(given[1], inside)
        elif word == "ATOMIC_GROUP":
            count += _repeats(given, inside)
        elif word in ("GROUPREF", "GROUPREF_EXISTS"):
            count += REPEATS + 1
    return count


def _wrong(where: str, value: Any, wanted: str) -> SourceError:
    said = repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return SourceError(f"{where} is {said}; expected {wanted}")
