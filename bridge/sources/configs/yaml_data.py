"""YAML as data: a tag is a word, an object is a mapping; must never make, import or call what a file names."""

from __future__ import annotations

import re
from typing import Any

import yaml

from bridge.errors import SourceError
from bridge.sources.programs import REFUSAL, runs_programs

MOST_BYTES = 1 << 20  # the largest seen, a whole training run's configuration, has 60 kB
MOST_VALUES = 100_000  # aliases count as often as they are used: 500 bytes of them can stand for 10**9 values
DEEPEST = 64
_YAML = "tag:yaml.org,2002:"
# YAML 1.1 wants a dot in a float, which neither people nor C's printf know.
_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
_SEQUENCES = ("seq", "python/tuple", "python/list", "set")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Composes nodes, counted; its constructors are asked for plain scalars only."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MOST_VALUES:
            raise _Refused(f"has more than {MOST_VALUES} values")
        return super().compose_node(parent, index)


class _Refused(Exception):
    pass


def read_yaml(text: bytes | str, where: str) -> Any:
    """Return a YAML document as dicts, lists, strings, numbers and None; what an unknown tag marks stays data.

    >>> read_yaml("a: 1e-5\\nb: !!python/name:torch.bfloat16 ''", "x.yaml")
    {'a': 1e-05, 'b': {'_tag_': 'tag:yaml.org,2002:python/name:torch.bfloat16', '_value_': ''}}
    """
    if len(text) > MOST_BYTES:
        raise SourceError(f"{where}: {len(text)} bytes are no configuration; at most {MOST_BYTES} are read")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _Walk(loader).data(node, 0)
        finally:
            loader.dispose()
    except _Refused as error:
        raise SourceError(f"{where}: {error}; it is not read as a configuration") from error
    except RecursionError as error:
        raise SourceError(f"{where}: nested too deep to be a configuration") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SourceError(f"{where}: cannot be read as YAML: {' '.join(str(error).split())}") from error


class _Walk:
    """Turns nodes into data under a budget of values."""

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader
        self.left = MOST_VALUES

    def data(self, node: yaml.Node, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Refused(f"stands for more than {MOST_VALUES} values (aliases of aliases?)")
        if depth > DEEPEST:
            raise _Refused(f"is nested more than {DEEPEST} deep, or holds itself")
        kind = node.tag.removeprefix(_YAML)
        _refuse_programs(kind.rpartition(":")[2] if kind.startswith("python/") else "", node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind)
        if isinstance(node, yaml.SequenceNode):
            found: Any = [self.data(item, depth + 1) for item in node.value]
            return found if kind in _SEQUENCES else _tagged(node, found)
        found = {}
        for key_node, value_node in node.value:
            key = self.data(key_node, depth + 1)
            if isinstance(key, dict | list):
                raise _Refused(f"has a key that is no word in line {key_node.start_mark.line + 1}")
            if key in found:
                raise _Refused(f"has the key {key!r} twice, the second time in line {key_node.start_mark.line + 1}")
            found[key] = self.data(value_node, depth + 1)
            _refuse_programs(target({key: found[key]}) or "", value_node)
        return found if kind in ("map", "omap", "set") else _tagged(node, found)

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> Any:
        try:
            return self._plain(node, kind)
        except (ValueError, LookupError, OverflowError) as error:  # a tag promises what the text does not hold
            line = node.start_mark.line + 1
            raise _Refused(f"has {node.value[:40]!r} in line {line}, which is no {kind}") from error

    def _plain(self, node: yaml.ScalarNode, kind: str) -> Any:
        match kind:
            case "null":
                return None
            case "bool":
                return bool(self.loader.construct_yaml_bool(node))
            case "int":
                return int(self.loader.construct_yaml_int(node))
            case "float":
                return float(self.loader.construct_yaml_float(node))
            case "str" if node.style is None and _FLOAT.fullmatch(node.value):
                return float(node.value)
            case "str" | "timestamp" | "merge" | "value" | "python/str" | "python/unicode":
                return node.value
            case _:
                return _tagged(node, node.value)


def _refuse_programs(name: str, node: yaml.Node) -> None:
    if runs_programs(name):
        raise _Refused(f"asks for {name[:80]} in line {node.start_mark.line + 1}, {REFUSAL}")


def _tagged(node: yaml.Node, value: Any) -> dict[str, Any]:
    return {"_tag_": node.tag, "_value_": value}


def target(value: object) -> str | None:
    """Return the name of what a mapping was dumped from, as NeMo and Megatron-Bridge write it; it is not looked up."""
    name = value.get("_target_") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
