"""Check a step's arguments by the types in its verb's signature."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bridge.core.errors import UsageError
from bridge.core.parsing.relative import MAX_QUOTED

WORDS = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
TEXTS = ("model", "student", "teacher", "calib", "tokenizer", "base")  # in Python also objects; a file has only text


def check_types(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """UsageError for a value of a type that the verb does not take."""
    hints = get_type_hints(verb)
    for key, value in arguments.items():
        kinds = (str,) if key in TEXTS else _kinds(hints[key])
        if not any(_fits(value, kind) for kind in kinds):
            raise UsageError(f"{key} = {repr(value)[:MAX_QUOTED]}; expected {_words(kinds)}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _name(kind: Any) -> Any:
    """The type without what it holds; of a set of words, text."""
    return str if get_origin(kind) is Literal else get_origin(kind) or kind


def _words(kinds: tuple[Any, ...]) -> str:
    """What a file writes for these types."""
    words: list[str] = []
    for kind in kinds:
        name, inner = _name(kind), get_args(kind)
        if name in (Mapping, Sequence):
            within = _words(_kinds(inner[-1]))
            words.append(("a table" if name is Mapping else "a list") + (f" (each value: {within})" if within else ""))
        elif name in WORDS:
            words.append(WORDS[name])
    return " or ".join(dict.fromkeys(words))


def _fits(value: Any, kind: Any) -> bool:
    name, inner = _name(kind), get_args(kind)
    if kind is Any:
        return True
    if name is Mapping:
        return isinstance(value, Mapping) and all(_fits_any(item, inner[1]) for item in value.values())
    if name is Sequence:
        return isinstance(value, list) and all(_fits_any(item, inner[0]) for item in value)
    return type(value) is name or (name is float and type(value) is int)


def _fits_any(value: Any, hint: Any) -> bool:
    return any(_fits(value, kind) for kind in _kinds(hint))
