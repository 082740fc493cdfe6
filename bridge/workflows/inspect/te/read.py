"""Read TransformerEngine's config.yaml, and report all its mistakes in one error.

    first layers:                          # a section of any name
      enabled: True
      layers: {roles: [mlp.down], layer_numbers: [0, -1]}
      transformer_engine:                  # or bridge
        LogTensorStats: {enabled: True, tensors: [activation, weight], stats: [cur_amax, kurtosis], freq: 10}

A section or feature that is not enabled is not looked at. Nothing here needs a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from bridge.core.addresses import check_length, check_local
from bridge.core.errors import InspectError, SourceError, UsageError, reason
from bridge.core.parsing.problems import Problems
from bridge.core.text import described, nearest
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.configs.yaml_data import MAX_BYTES, read_yaml
from bridge.workflows.inspect.language import Config
from bridge.workflows.inspect.te.features import (
    GENERIC,
    KINDS,
    Feature,
    clashes,
    is_enabled,
    parse_feature,
    parse_generic,
)
from bridge.workflows.inspect.te.selectors import Selector, parse_selector
from bridge.workflows.inspect.te.where import Known, OwnFeature, Where

NAMESPACES = ("transformer_engine", "bridge")  # of features; the second is our name of the first
IN_MEMORY, DEFAULT = "config", "the default config"  # where a config comes from, in messages
WHAT_IF = ("fp8", "int8", "nvfp4", "mxfp8")  # schemes of the default config if the session quantizes nothing


@dataclass(frozen=True)
class Section:
    """An enabled section. `generic`: features that answer explicit calls only."""

    name: str
    selector: Selector
    features: tuple[Feature, ...]
    generic: tuple[Feature, ...] = ()


@dataclass(frozen=True)
class InspectConfig:
    """A parsed config. `where`: its name in messages. `digest`: of its content, for results."""

    where: str
    sections: tuple[Section, ...]
    digest: str


def read_config(
    config: Config, session: Scheme | None = None, own: Iterable[OwnFeature] = (), called: bool = False
) -> InspectConfig:
    """Read a config from a file or a dict; None is the default config. InspectError lists every mistake.

    `session`: the scheme that the run simulates. `own`: feature classes of the caller's. `called`: for modules that
    quantize by themselves and call the features.

    >>> section = {"enabled": True, "layers": {"layer_types": "all"}, "bridge": {"DisableFP8Layer": {"enabled": True}}}
    >>> read_config({"everything": section}).sections[0].features[0].name
    'DisableQuantizationLayer'
    """
    problems = Problems()
    parsed = parse_config(config, Known(session, {feature.name: feature for feature in own}, called), problems)
    raise_problems(parsed.where, problems)
    return parsed


def parse_config(config: Config, known: Known, problems: Problems) -> InspectConfig:
    """As `read_config`, but record the mistakes; sections with mistakes keep what could be read."""
    where, content = _content(config, known.session)
    if not isinstance(content, Mapping):
        problems.add(f"expected sections, got {described(content)}")
        content = {}
    before = problems.places
    sections = tuple(filter(None, (_section(str(name), words, known, problems) for name, words in content.items())))
    if problems.places == before and not any(section.features or section.generic for section in sections):
        problems.add("no feature is enabled; write `enabled: True` in a section and in a feature of it")
    return InspectConfig(where, sections, _digest(content))


def raise_problems(where: str, problems: Problems) -> None:
    """Raise one InspectError for all problems, if there are any."""
    lines = problems.lines()
    if len(lines) == 1:
        raise InspectError(f"{where}: {lines[0]}")
    if lines:
        raise InspectError("\n  ".join([f"{where}: {len(lines)} problems", *lines]))


def default_config(session: Scheme | None) -> dict[str, Any]:
    """Activation and weight of every layer: their range, and the loss by the session's scheme, else by four others."""
    stats = ("sqnr", "cosine", "underflows%")
    loss = [*stats] if session else [f"{scheme}_{stat}" for scheme in WHAT_IF for stat in stats]
    both = {"enabled": True, "tensors": ["activation", "weight"]}
    features = {
        "LogTensorStats": {**both, "stats": ["cur_amax", "p99.9", "outlier_ratio", "nan%", "histogram"]},
        "LogQuantizedTensorStats": {**both, "stats": loss},
    }
    return {"default": {"enabled": True, "layers": {"layer_types": ["all"]}, "bridge": features}}


def _content(config: Any, session: Scheme | None) -> tuple[str, Any]:
    """The name of a config in messages, and its content."""
    if config is None:
        return DEFAULT, default_config(session)
    if isinstance(config, Mapping):
        return IN_MEMORY, config
    if not isinstance(config, str | Path):
        raise UsageError(f"config takes a path, a dict or None, not {type(config).__name__}")
    check_local(config=config)
    check_length(config)
    path = Path(config)
    if not path.is_file():
        raise UsageError(f"config={str(config)!r}: no such file")
    try:
        with path.open("rb") as file:
            return str(path), read_yaml(file.read(MAX_BYTES + 1), str(path))
    except OSError as error:
        raise InspectError(f"{path}: {reason(error)}") from error
    except SourceError as error:
        raise InspectError(str(error)) from error


def _section(name: str, words: Any, known: Known, problems: Problems) -> Section | None:
    where = Where(f"section {name!r}", known, problems)
    if not is_enabled(words, where):
        return None
    names = ("enabled", "layers", *NAMESPACES, GENERIC.name)
    for key in words:
        if key not in names:
            where.add(f"{described(key)} is unknown{_misplaced(key, known)}; {nearest(str(key), names)}")
    selector = parse_selector(words.get("layers"), where)
    features = tuple(
        feature for key, inner in _features(words, where) if (feature := parse_feature(key, inner, where.inside(key)))
    )
    for one, other in combinations(features, 2):
        if places := clashes(one, other):
            where.add(f"{one.name} and {other.name} both change {', '.join(places)}; leave one of them out")
    generic = parse_generic(words[GENERIC.name], where.inside(GENERIC.name)) if GENERIC.name in words else None
    return Section(name, selector, features, (generic,) if generic else ()) if selector else None


def _features(words: Mapping[str, Any], where: Where) -> Iterator[tuple[str, Any]]:
    """The features of both namespaces with their words."""
    seen: set[str] = set()
    for namespace in NAMESPACES:
        inner = words.get(namespace, {})
        if not isinstance(inner, Mapping):
            where.add(f"{namespace} = {described(inner)}; expected features")
            continue
        for key, value in inner.items():
            if str(key) in seen:
                where.add(f"{key} is given under {' and '.join(NAMESPACES)}; write it once")
                continue
            seen.add(str(key))
            yield str(key), value


def _misplaced(key: object, known: Known) -> str:
    """A hint for a feature that stands in the section itself."""
    return f"; write it under {NAMESPACES[0]}" if key in KINDS or key in known.own else ""


def _digest(content: Any) -> str:
    try:
        text = json.dumps(content, sort_keys=True, default=str)
    except (ValueError, TypeError, RecursionError):  # a dict of the caller's: keys of several types, or a cycle
        text = repr(content)
    return hashlib.sha256(text.encode()).hexdigest()
