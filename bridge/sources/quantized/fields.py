"""Read the fields of an untrusted `quantization_config` with type checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.mappings import mappings, read_table
from bridge.core.text import described

MAX_NUMBER = 1 << 31  # values of a block
MAX_PATTERN = 512  # characters of a pattern, and of a name that it is matched with
MAX_REPEATS = 4  # unbounded repeats in a pattern: matching takes the length of the name to this power
_UNBOUNDED = 64
CONFIGS = ("quantization_config", "compression_config")
BESIDE = "expert_dtype"  # DeepSeek-V4 has it beside the section, into which transformers moves it
ROTATED = "transform_config"  # of compressed-tensors: read by `rotations`
MODELOPT_FILE = "hf_quant_config.json"


def sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a config says of quantization, for the model or for a part of it; see `BESIDE`."""
    holders = (holder for holder in (config, *config.values()) if isinstance(holder, Mapping))
    found = ((holder.get(key), holder.get(BESIDE)) for holder in holders for key in CONFIGS)
    return ({**({BESIDE: beside} if beside else {}), **part} for part, beside in found if isinstance(part, Mapping))


def unknown(section: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Entries of a section that are on and that `mappings/quantization.toml` does not know."""
    known = read_table(mappings() / "quantization.toml").section(method)
    names = {name for kind in ("read", "without_effect", "of_inputs") for name in known.get(kind, ())}
    plain = known.get("plain", {})
    found = {}
    for name, value in section.items():
        excludes = name == "dynamic" and isinstance(value, Mapping)  # GPTQModel's rules: "-:" names what has no codes
        if excludes and all(rule.startswith("-:") or not own for rule, own in value.items()):
            continue
        if value and name not in names and value not in plain.get(name, ()):
            found[name] = value
    return found


def of_inputs(section: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Entries that say how the program that loads the codes quantizes inputs."""
    names = read_table(mappings() / "quantization.toml").section(method).get("of_inputs", ())
    return {name: section[name] for name in names if section.get(name)}


def why_unread(name: str, method: str) -> str:
    """Why weights under an unknown entry are not decoded, and what to do."""
    return (
        f"quantization_config: {name} of {method} is not read, and may say what the codes mean; start from the "
        "unquantized checkpoint"
    )


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """An object; empty for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "an object")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings; empty for None."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise _wrong(where, value, "a list of strings")
    return tuple(value)


def whole(value: Any, where: str, default: int) -> int:
    """A whole number."""
    if value is None:
        return default
    if type(value) is not int or abs(value) > MAX_NUMBER:
        raise _wrong(where, value, "a whole number")
    return value


def block(value: Any, where: str) -> tuple[int, ...]:
    """One or two sizes of a block."""
    sizes = [value] if type(value) is int else value
    if isinstance(sizes, str):
        sizes = [int(n) if n.isascii() and n.isdecimal() and len(n) < 10 else 0 for n in sizes.split("x")]
    if not isinstance(sizes, list | tuple) or len(sizes) not in (1, 2):
        raise _wrong(where, value, "one or two sizes")
    if not all(type(n) is int and 0 < n <= MAX_NUMBER for n in sizes):
        raise _wrong(where, value, "sizes above 0")
    return tuple(sizes)


def matches(pattern: str, name: str, where: str) -> bool:
    """Whether a regular expression of the file matches the beginning of `name`, as `re.match` does.

    SourceError for one whose matching might not end: repeats within repeats, or too many.
    """
    if len(name) > MAX_PATTERN:
        raise SourceError(f"{where}: a name of more than {MAX_PATTERN} characters")
    return compiled(pattern, where).match(name) is not None


@lru_cache
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """The regular expression; SourceError as `matches` has it."""
    if len(pattern) > MAX_PATTERN:
        raise SourceError(f"{where}: a pattern of more than {MAX_PATTERN} characters")
    try:
        result = re.compile(pattern)
        repeats = _repeats(re._parser.parse(pattern), False)  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError) as error:
        raise SourceError(f"{where}: {pattern[:80]!r} is not a regular expression: {error}") from error
    if repeats > MAX_REPEATS:
        raise SourceError(
            f"{where}: {pattern[:80]!r} has repeats within repeats, or more than {MAX_REPEATS}, and matching it might "
            "not end; name the modules instead"
        )
    return result


def _repeats(parsed: Any, inside: bool) -> int:
    """Count the unbounded repeats of a parsed pattern; more than allowed for repeats within repeats."""
    count = 0
    for op, arguments in parsed:
        word = str(op)
        if word in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = arguments
            many = int(most) > 1
            count += MAX_REPEATS + 1 if inside and many else int(int(most) > _UNBOUNDED)
            count += _repeats(inner, inside or many)
        elif word in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            count += _repeats(arguments[-1], inside)
        elif word == "BRANCH":
            inner = [_repeats(branch, inside) for branch in arguments[1]]
            count += MAX_REPEATS + 1 if inside and len(inner) > 1 else sum(inner)
        elif word == "ATOMIC_GROUP":
            count += _repeats(arguments, inside)
        elif word in ("GROUPREF", "GROUPREF_EXISTS"):
            count += MAX_REPEATS + 1
    return count


def _wrong(where: str, value: Any, expected: str) -> SourceError:
    return SourceError(f"{where} is {described(value)}; expected {expected}")
