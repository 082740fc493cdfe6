"""Changes to valid artefacts: to the parts of a tree, the words of a text, the bytes of a file; never makes one up."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


class Again(str):
    """A key that a dict takes beside its equal, so that an object names it twice."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass(frozen=True, repr=False)
class Raw:
    """A value as text, which no value of Python's would be written as. Hypothesis prints options: these are long."""

    text: str

    def __repr__(self) -> str:
        return f"Raw({self.text[:8]!r}...)"


LARGEST = 2 << 20  # characters that a text grows to: more than readers of texts take, and far less than a machine has
DEEP = tuple(Raw(opening * n + closing * n) for opening, closing in ("[]", ('{"a":', "}")) for n in (40, 900, 20_000))
INTEGERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    10**400,
    10**4200,
)
WORDS = (
    "",
    " ",
    "a",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "C:\\x",
    "\0",
    "a\0b",
    "\n",
    "\r\n",
    "\x1b[2J",
    "\ud800",
    "\ufeff",
    "é",
    "ﬀ",
    "²",
    "٣",
    "x" * 300,
    "." * 300,
    "9" * 5000,
    "{l}",
    "{0}",
    "%s%n",
    "__class__",
    "model",
    "weight",
    "NaN",
    "true",
    "none",
    "layers.{l}",
    "a.b.c.d",
    "model.layers.99999999999.w",
    "*",
    "[a-",
    "float32",
    "F8_E5M2",
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"), Raw("1e999"), Raw("-1E+400"))
VALUES: tuple[Any, ...] = (
    *INTEGERS,
    *WORDS,
    *FLOATS,
    True,
    False,
    None,
    [],
    {},
    [[]],
    [None],
    [-1],
    [2**63, 2**63],
    {"a": 1},
    [1] * 3000,
    {"": ""},
    *DEEP,
    Raw("9" * 5000),
)


def pick(draw: st.DrawFn, options: Sequence[Any]) -> Any:
    """A copy of one of them, by its place: Hypothesis keeps `sampled_from` of equal options, and 1 equals True."""
    return copy.deepcopy(options[draw(st.integers(0, len(options) - 1))])


def place(draw: st.DrawFn, root: list[Any]) -> tuple[Any, Any]:
    """Some (container, key) of a tree."""
    found = places(root)
    return found[draw(st.integers(0, len(found) - 1))]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found = []
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        found.append((tree, key))
        found += places(tree[key])
    return found


@st.composite
def trees(draw: st.DrawFn, tree: Any, values: Sequence[Any] = VALUES, most: int = 3) -> Any:
    """`tree` with some of its parts changed."""
    root = [copy.deepcopy(tree)]
    for _ in range(draw(st.integers(1, most))):
        held, key = place(draw, root)
        change = pick(draw, ("value", "value", "near", "near", "drop", "name", "twice", "swap", "wrap", "more"))
        _change(draw, root, held, key, change, values)
    return root[0]


def _change(draw: st.DrawFn, root: list[Any], held: Any, key: Any, change: str, values: Sequence[Any]) -> None:
    if change == "near":
        held[key] = _near(draw, held[key])
    elif change == "drop" and held is not root:
        del held[key]
    elif change == "name" and isinstance(held, dict):
        held[pick(draw, WORDS)] = held.pop(key)
    elif change == "twice" and isinstance(held, dict):
        held[Again(key)] = pick(draw, values) if draw(st.booleans()) else held[key]
    elif change == "twice" and held is not root:
        held.insert(key, held[key])
    elif change == "swap":
        other, there = place(draw, root)
        held[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(held[key])
    elif change == "wrap":
        held[key] = pick(draw, ([held[key]], {"a": held[key]}, str(held[key])[:100]))
    elif change == "more" and isinstance(held[key], dict):
        held[key][pick(draw, WORDS)] = pick(draw, values)
    elif change == "more" and isinstance(held[key], list):
        held[key].append(pick(draw, values))
    else:
        held[key] = pick(draw, values)


def _near(draw: st.DrawFn, value: Any) -> Any:
    """Another value of the same kind, so that a check of the kind alone lets it pass."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick(draw, (value + 1, value - 1, value * 2, -value, value + 0.0 if abs(value) < 2**60 else 0))
    if isinstance(value, float):
        return pick(draw, (value * 2, -value, value + 1e-9, 0.0, 1))
    if isinstance(value, str):
        return pick(draw, (value + "x", value[:-1], value.upper(), value + "\0", value * 3, f" {value}"))
    return pick(draw, VALUES)


def json_text(tree: Any) -> bytes:
    """A tree as JSON, with what `json` would refuse to write: names that stand twice, numbers that are none."""
    return _text(tree).encode("utf-8", "surrogatepass")


def _text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_text(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ",".join(map(_text, tree)) + "]"
    return json.dumps(tree)


def toml_text(tree: Any) -> bytes:
    """A tree as TOML, tables written in line, with what a file may say wrongly: a null, a name that stands twice."""
    held = tree.items() if isinstance(tree, dict) else [("", tree)]
    lines = [f"{json.dumps(str(key))} = {_line(value)}\n" for key, value in held]
    return "".join(lines).encode("utf-8", "surrogatepass")


def _line(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_line(held)}" for key, held in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_line, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def jsons(tree: Any, values: Sequence[Any] = VALUES) -> SearchStrategy[bytes]:
    """`tree`, changed, as JSON; sometimes the text is damaged as well."""
    whole = trees(tree, values).map(json_text)
    return st.one_of(whole, whole, whole, whole.flatmap(damaged), damaged(json_text(tree)))


@st.composite
def damaged(draw: st.DrawFn, data: bytes, edge: int = 0, most: int = 4) -> bytes:
    """`data` with some of its bytes changed: half of the changes in the first `edge` ones, where they are given."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        near = edge and draw(st.booleans())
        at = draw(st.integers(0, max(0, min(edge, len(found)) if near else len(found))))
        change = pick(draw, ("set", "set", "set", "ff", "zero", "cut", "insert", "copy", "end"))
        if change == "set":
            found[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif change in ("ff", "zero"):
            found[at : at + 4] = (b"\xff" if change == "ff" else b"\0") * pick(draw, (1, 2, 4, 8))
        elif change == "cut":
            del found[at : at + pick(draw, (1, 2, 7, 64, 512))]
        elif change == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif change == "copy":
            found[at:at] = found[at : at + pick(draw, (1, 8, 64, 512))]
        else:
            del found[at:]
    return bytes(found)


@st.composite
def texts(draw: st.DrawFn, text: str, words: Iterable[str] = (), most: int = 3) -> str:
    """`text` with some of its words and lines changed; `words` are those that mean something in it."""
    known = (*words, *WORDS, *(str(n)[:4300] for n in INTEGERS))
    for _ in range(draw(st.integers(1, most))):
        lines = draw(st.integers(0, 1))
        tokens = text.splitlines(keepends=True) if lines else re.findall(r"\w+|\s+|[^\w\s]", text)
        if not tokens:
            return str(pick(draw, known))
        at, other = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, len(tokens) - 1))
        change = pick(draw, ("word", "word", "drop", "twice", "swap", "insert", "many"))
        if change == "word":
            tokens[at] = pick(draw, known)
        elif change == "drop":
            del tokens[at]
        elif change == "twice":
            tokens.insert(other, tokens[at])
        elif change == "swap":
            tokens[at], tokens[other] = tokens[other], tokens[at]
        elif change == "insert":
            tokens.insert(at, pick(draw, known))
        else:
            tokens[at] *= min(pick(draw, (3, 50, 2000)), max(1, LARGEST // len(tokens[at])))
        text = "".join(tokens)
    return text


def encoded(text: SearchStrategy[str]) -> SearchStrategy[bytes]:
    """Texts as the bytes of a file, a few of them no UTF-8."""
    whole = text.map(lambda found: found.encode("utf-8", "surrogatepass"))
    return st.one_of(whole, whole, whole, whole, whole.flatmap(damaged))


def one_file(name: str) -> Callable[[bytes], dict[str, bytes | None]]:
    """The case that replaces one file."""
    return lambda content: {name: content}
