"""Select layers by the `layers` of a section.

The keys of TransformerEngine, and two of ours, `roles` and `modules`, with the globs of recipes. Keys are ANDed and the
entries of a key ORed; beside `layer_name_regex_pattern` TransformerEngine's other keys are ignored, as it does itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bridge.core.text import described, layer_of, named, natural, nearest, pattern
from bridge.quant.schemes.layer_ranges import Span, from_start, parse_span
from bridge.tables.architectures.roles import load_roles
from bridge.workflows.inspect.layers import MATRICES, Layer
from bridge.workflows.inspect.te.where import Where

ALL = "all"
REGEX = "layer_name_regex_pattern"
KEYS = (REGEX, "layer_types", "layer_numbers", "exact_layer_names", "roles", "modules")


@dataclass(frozen=True)
class Selector:
    """The parsed `layers`; an empty key takes every layer. `layer_types` are parts of a name."""

    regex: re.Pattern[str] | None = None
    layer_types: tuple[str, ...] = ()
    layer_numbers: tuple[Span, ...] = ()
    exact_layer_names: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def matches(self, layer: Layer, depth: int) -> bool:
        """Whether the section is about `layer`; `depth`: the model's layers, from which negative numbers count."""
        if self.roles and not any(role_fits(glob, role) for glob in self.roles for role in layer.roles):
            return False
        if self.modules and not any(fnmatchcase(layer.name, glob) for glob in self.modules):
            return False
        if self.regex is not None:
            return self.regex.search(layer.name) is not None
        if self.exact_layer_names and layer.name not in self.exact_layer_names:
            return False
        if self.layer_types and not any(part in layer.name for part in self.layer_types):
            return False
        spans = from_start(self.layer_numbers, depth)
        return not spans or (layer.number is not None and any(a <= layer.number <= b for a, b in spans))

    def problems(self, layers: Sequence[Layer]) -> Iterator[str]:
        """Yield why the section does not fit a model: names that it lacks, or no layer that matches."""
        names, depth = [layer.name for layer in layers], depth_of(layers)
        known = frozenset(names)
        lacking = [name for name in self.exact_layer_names if name not in known] if self.regex is None else []
        for name in lacking:
            yield f"exact_layer_names: the model has no layer {name!r}{_closest([name], names)}"
        if not lacking and not any(self.matches(layer, depth) for layer in layers):
            yield f"matches no layer; {self._offer(layers)}"

    def _offer(self, layers: Sequence[Layer]) -> str:
        """The layers or roles that the writer may have meant."""
        if not layers:
            return "the model has none that can be inspected"
        if self.roles and not any(
            role_fits(glob, role) for glob in self.roles for each in layers for role in each.roles
        ):
            known = sorted({role.removesuffix(".weight") for layer in layers for role in layer.roles})
            text = f"roles: the model has none of {', '.join(self.roles)}"
            return (
                f"{text}; {nearest(self.roles[0], known)}"
                if known
                else f"{text}: no table knows its layers; use modules"
            )
        names = [layer.name for layer in layers]
        words = [*self.modules, *self.layer_types] if self.regex is None else [self.regex.pattern]
        return f"the model has {named(names)}{_closest(words, names)}"


def depth_of(layers: Iterable[Layer]) -> int:
    """How many numbered layers a model has."""
    return 1 + max((layer.number for layer in layers if layer.number is not None), default=-1)


def role_fits(glob: str, role: str) -> bool:
    """Whether a glob names a role, whose `.weight` may be left out.

    >>> role_fits("attn.q", "attn.q.weight"), role_fits("mlp.*", "mlp.down.weight"), role_fits("attn", "attn.q.weight")
    (True, True, False)
    """
    return fnmatchcase(role, glob) or fnmatchcase(role.removesuffix(".weight"), glob)


def parse_selector(words: Any, where: Where) -> Selector | None:
    """Return the selector of a section's `layers`; None with problems if there is none."""
    if not isinstance(words, Mapping) or not words:
        text = "`layers` is missing" if words is None else f"layers = {described(words)}"
        where.add(f"{text}; write at least one of {', '.join(KEYS)}")
        return None
    at, before = where.inside("layers"), where.count
    for key in words:
        if key not in KEYS:
            at.add(f"{described(key)} is unknown; {nearest(str(key), KEYS)}")
    selector = Selector(
        regex=_regex(words, at),
        layer_types=_all_or(_texts(words, "layer_types", at)),
        layer_numbers=_numbers(words, at),
        exact_layer_names=_texts(words, "exact_layer_names", at),
        roles=_roles(words, at),
        modules=_texts(words, "modules", at),
    )
    return selector if where.count == before else None


def _regex(words: Mapping[str, Any], at: Where) -> re.Pattern[str] | None:
    if REGEX not in words:
        return None
    text = words[REGEX]
    try:
        if isinstance(text, str):
            return re.compile(text)
        at.add(f"{REGEX} = {described(text)}; expected a text in quotes")
    except (re.error, RecursionError, OverflowError) as error:
        at.add(f"{REGEX} = {described(text)} is not a regular expression: {error}")
    return None


def _texts(words: Mapping[str, Any], key: str, at: Where) -> tuple[str, ...]:
    """A list of texts; a text is a list of one."""
    if key not in words:
        return ()
    entries = [words[key]] if isinstance(words[key], str) else words[key]
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(e, str) and e for e in entries):
        at.add(f"{key} = {_shown(words[key])}; expected a list of texts")
        return ()
    return tuple(entries)


def _all_or(texts: tuple[str, ...]) -> tuple[str, ...]:
    return () if ALL in texts else texts


def _numbers(words: Mapping[str, Any], at: Where) -> tuple[Span, ...]:
    if "layer_numbers" not in words:
        return ()
    entries = words["layer_numbers"]
    entries = list(entries) if isinstance(entries, list | tuple) else [entries]
    if not entries:
        at.add(f"layer_numbers is empty; write numbers, or {ALL}")
    if any(isinstance(entry, str) and entry.lower() == ALL for entry in entries):
        return ()
    spans = []
    for entry in entries:
        try:
            spans.append(parse_span(entry, dash=True))
        except ValueError as error:
            at.add(f"layer_numbers: {error}")
    return tuple(spans)


def _roles(words: Mapping[str, Any], at: Where) -> tuple[str, ...]:
    globs = _texts(words, "roles", at)
    known = [role.name for role in load_roles().roles.values() if role.kind in MATRICES]
    for glob in globs:
        if not any(role_fits(glob, role) for role in known):
            short = [role.removesuffix(".weight") for role in known]
            at.add(f"no role is called {glob!r}; {nearest(glob, short)}")
    return globs


def _shown(value: Any) -> str:
    return str(list(value))[:80] if isinstance(value, list | tuple) else described(value)


def _closest(words: Sequence[str], names: Sequence[str]) -> str:
    """The names nearest to a word, or to their last parts: of its own layer, and one of names that repeat."""
    close: dict[str, None] = {}
    for word in words:
        number = layer_of(word)
        same = names if number is None else [name for name in names if layer_of(name) == number]
        kinds = {pattern(name): name for name in reversed(same)}.values()
        parts = {part: name for name in kinds for part in _endings(name)}
        close.update(
            dict.fromkeys(parts[part] for part in difflib.get_close_matches(word[:100], parts, n=2, cutoff=0.5))
        )
    return f"; nearest: {', '.join(sorted(close, key=natural))}" if close else ""


def _endings(name: str) -> Iterator[str]:
    """A name, and its last one and two parts."""
    parts = name.split(".")
    yield from dict.fromkeys((name, ".".join(parts[-2:]), parts[-1]))
