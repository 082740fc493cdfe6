"""Text for messages.

Lists, numbers, sizes, folded layer names, the nearest known word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from bridge.core.errors import SourceError, UsageError

T = TypeVar("T")
_CLASS = re.compile(r"For[A-Z]\w+$")  # what most names of classes end with, whatever the model
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

SHOWN = 8  # problems or names in one message; a checkpoint of Git-LFS pointers has hundreds of the same
MAX_COMPARED = 100  # characters of a name that are compared with others: difflib takes the product of the lengths
ALIKE = 0.6  # of difflib, from 0 to 1: a name below it is nonsense, to which no other is near
MAX_COMPONENTS = 32  # of a name that is folded; each takes a pass over all names


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c; nearest: b" for an error about an unknown `name`."""
    names = sorted(known)
    return f"known: {', '.join(names)}" + (f"; nearest: {close}" if (close := near(name, names)) else "")


def near(name: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return the name that is near to an unknown one, "" without one; of classes what is before `ForCausalLM` counts.

    >>> near("Llama2ForCausalLM", ["LlamaForCausalLM"]), near("OlmoForCausalLM", ["GemmaForCausalLM"])
    ('LlamaForCausalLM', '')
    """
    import difflib

    name, stems = name[:MAX_COMPARED], {each: _CLASS.sub("", each) for each in known if len(each) <= MAX_COMPARED}
    like = difflib.get_close_matches(_CLASS.sub("", name), {*stems.values()}, n=len(stems) or 1, cutoff=alike)
    close = difflib.get_close_matches(name, [each for each in stems if stems[each] in like], n=1, cutoff=alike)
    return close[0] if close else ""


def number(count: int, word: str, words: str = "") -> str:
    """Return a count with its noun, whose plural is `words`.

    >>> number(1, "row"), number(2, "row"), number(2, "policy", "policies")
    ('1 row', '2 rows', '2 policies')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {words or f'{word}s'}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first of many names, and the count of the others.

    >>> first_of(["a", "b", "c"], 2), first_of(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def fold_layers(names: Iterable[str]) -> list[str]:
    """Fold names that differ in one integer component, then in the next: layers, and the experts inside them.

    >>> fold_layers(["layers.0.q", "layers.1.q", "norm"])
    ['layers.{0..1}.q', 'norm']
    >>> fold_layers(f"layers.{layer}.experts.{expert}.up" for layer in (0, 1) for expert in (0, 2, 3))
    ['layers.{0..1}.experts.{0,2..3}.up']
    """
    folded = [tuple(name.split(".")) for name in names]
    for at in range(min(MAX_COMPONENTS, max(map(len, folded), default=0))):
        groups: dict[tuple[str, ...], list[int]] = {}
        for parts in folded:
            # at most as many digits as a count of layers has, and ASCII: `int` does not take every script
            if at < len(parts) and len(parts[at]) < 10 and parts[at].isascii() and parts[at].isdecimal():
                groups.setdefault((*parts[:at], "{}", *parts[at + 1 :]), []).append(int(parts[at]))
            else:
                groups.setdefault(parts, [])
        folded = [
            (*key[:at], _ranges(sorted(set(numbers))), *key[at + 1 :]) if numbers else key
            for key, numbers in groups.items()
        ]
    return [".".join(parts) for parts in folded]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def fold_problems(problems: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for each different text, after its names with layers folded; "" is not a name.

    >>> fold_problems([("h.0.q", "is missing"), ("h.1.q", "is missing")])
    ['h.{0..1}.q: is missing']
    """
    by_text: dict[str, list[str]] = {}
    for name, text in problems:
        by_text.setdefault(text, []).extend([name] if name else [])
    return [f"{', '.join(fold_layers(names))}: {text}" if names else text for text, names in by_text.items()]


def described(value: object) -> str:
    """Return an untrusted value for a message, shortened: its text or its type."""
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def named(names: Iterable[str]) -> str:
    """Return names for a message: sorted, layers folded, at most `SHOWN`."""
    return first_of(fold_layers(sorted(names, key=natural)), SHOWN)


def listed(where: str, problems: Iterable[str]) -> SourceError:
    """Return one error for all problems of the model at `where`."""
    every = list(problems)
    if len(every) == 1:
        return SourceError(f"{where}: {every[0]}")
    more = [f"  and {len(every) - SHOWN} more"] if len(every) > SHOWN else []
    return SourceError("\n".join([f"{where}: {len(every)} problems", *(f"  {p}" for p in every[:SHOWN]), *more]))


def not_finite(tensor: str) -> SourceError:
    """Return the error for a tensor that holds NaN or infinity."""
    return SourceError(f"{tensor}: holds NaN or infinity; repair the checkpoint, or get it again")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return the natural sort key: `layers.2` comes before `layers.10`."""
    return [(0, int(part), "") if part.isdecimal() and len(part) < 10 else (1, 0, part) for part in name.split(".")]


def pattern(name: str) -> str:
    """Return the pattern of a repeated layer's name: `layers.3.mlp.up.weight` -> `layers.{}.mlp.up.weight`."""
    return _NUMBER.sub("{}", name)


def numbered(name: str) -> tuple[list[str], list[int]]:
    """Return the texts around the numbers of a name, and these: `layers.3.up` -> (["layers.", ".up"], [3])."""
    return _NUMBER.split(name), layer_numbers(name)


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer, None outside a layer."""
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def layer_numbers(name: str) -> list[int]:
    """Return the numbers of a tensor's name, of layers and experts: `layers.3.experts.0.up` -> [3, 0]."""
    return [int(number) for number in _NUMBER.findall(name)]


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group items by key, in the order of each key's first item."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def fold(names: Sequence[str]) -> str:
    """Return one text for names of the same pattern, with numbers as ranges.

    >>> fold(["layers.0.experts.0.up", "layers.0.experts.1.up", "layers.2.experts.0.up", "layers.2.experts.1.up"])
    'layers.{0,2}.experts.{0..1}.up'
    """
    if len(names) == 1:
        return names[0]
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ranges = (fold_layers(dict.fromkeys(column))[0] for column in columns)
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as `64x128`; "scalar" if it has no axis."""
    return "x".join(map(str, shape)) or "scalar"


def size(nbytes: int) -> str:
    """Return a count of bytes for people, in powers of 1000."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that a user thinks in.

    >>> duration(0.2), duration(40), duration(90), duration(5 * 3600), duration(12 * 86400)
    ('about 1 s', 'about 40 s', 'about 2 min', 'about 5 h', 'about 12 days')
    """
    for most, unit, name in ((90, 1, "s"), (5400, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < most:
            return f"about {max(1, round(seconds / unit))} {name}"
    return f"about {round(seconds / 86400)} days"


def token_count(text: str | int, name: str = "--evaluate") -> int:
    """Parse a number of tokens: 20k -> 20_000; `name` is for the error."""
    match = re.fullmatch(r"([0-9]{1,12})(k|m)?", str(text).strip().lower())
    count = int(match[1]) * {None: 1, "k": 1000, "m": 1_000_000}[match[2]] if match else 0
    if not count:
        raise UsageError(f"{name} {text!r} is not a number of tokens; write 4096 or 20k")
    return count


def byte_count(text: str | int, name: str = "--memory") -> int:
    """Parse a size: 2GB -> 2_000_000_000, 512MiB -> 536_870_912, a bare number is bytes; `name` is for the error."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt])(i?)b?|b)?", str(text).strip().lower())
    power = " kmgt".index(match[2] or " ") if match else 0
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if not nbytes:
        raise UsageError(f"{name} {text!r} is not a size; write 2GB, 512MiB or a number of bytes")
    return nbytes
