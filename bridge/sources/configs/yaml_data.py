"""Read YAML as data: tags become text, objects become mappings.

Nothing is imported or called.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from bridge.core.errors import SourceError
from bridge.core.formats.unpickle import REFUSAL, runs_programs
from bridge.sources.configs.facts import target

MAX_BYTES = 1 << 20  # the largest seen, a whole training run's configuration, has 60 kB
MAX_VALUES = 100_000  # aliases count as often as they are used: 500 bytes of them can stand for 10**9 values
MAX_DEPTH = 64
_YAML = "tag:yaml.org,2002:"
# YAML 1.1 requires a dot in a float; people and C's printf leave it out.
_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
_SEQUENCES = ("seq", "python/tuple", "python/list", "set")


class _Refused(Exception):
    pass


def read_yaml(text: bytes | str, where: str) -> Any:
    """Return a YAML document as dicts, lists, strings, numbers and None; a value with an unknown tag stays data.

    >>> read_yaml("a: 1e-5\\nb: !!python/name:torch.bfloat16 ''", "x.yaml")
    {'a': 1e-05, 'b': {'_tag_': 'tag:yaml.org,2002:python/name:torch.bfloat16', '_value_': ''}}
    """
    if len(text) > MAX_BYTES:
        raise SourceError(f"{where}: {len(text)} bytes; a configuration has at most {MAX_BYTES}")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else loader.data(node, 0)
        finally:
            loader.dispose()
    except _Refused as error:
        raise SourceError(f"{where}: {error}; it is not read as a configuration") from error
    except RecursionError as error:
        raise SourceError(f"{where}: nested too deeply for a configuration") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SourceError(f"{where}: cannot be read as YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Composes nodes and turns them into data, both under a budget; PyYAML's constructors make plain scalars only."""

    nodes = 0
    left = MAX_VALUES

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise _Refused(f"has more than {MAX_VALUES} values")
        return super().compose_node(parent, index)

    def data(self, node: yaml.Node, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Refused(f"stands for more than {MAX_VALUES} values (aliases of aliases?)")
        if depth > MAX_DEPTH:
            raise _Refused(f"is nested more than {MAX_DEPTH} deep, or contains itself")
        kind = node.tag.removeprefix(_YAML)
        _refuse_programs(kind.rpartition(":")[2] if kind.startswith("python/") else "", node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind)
        if isinstance(node, yaml.SequenceNode):
            items = [self.data(item, depth + 1) for item in node.value]
            return items if kind in _SEQUENCES else _tagged(node, items)
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.data(key_node, depth + 1)
            if isinstance(key, dict | list):
                raise _Refused(f"has a key that is not a word in line {key_node.start_mark.line + 1}")
            if key in mapping:
                raise _Refused(f"has the key {key!r} twice, the second time in line {key_node.start_mark.line + 1}")
            mapping[key] = self.data(value_node, depth + 1)
            _refuse_programs(target({key: mapping[key]}) or "", value_node)
        return mapping if kind in ("map", "omap", "set") else _tagged(node, mapping)

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> Any:
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return bool(self.construct_yaml_bool(node))
                case "int":
                    return int(self.construct_yaml_int(node))
                case "float":
                    return float(self.construct_yaml_float(node))
                case "str" if node.style is None and _FLOAT.fullmatch(node.value):
                    return float(node.value)
                case "str" | "timestamp" | "merge" | "value" | "python/str" | "python/unicode":
                    return node.value
                case _:
                    return _tagged(node, node.value)
        except (ValueError, LookupError, OverflowError) as error:  # the text does not fit its tag
            line = node.start_mark.line + 1
            raise _Refused(f"has {node.value[:40]!r} in line {line}, which is not of type {kind}") from error


def _refuse_programs(name: str, node: yaml.Node) -> None:
    if runs_programs(name):
        raise _Refused(f"asks for {name[:80]} in line {node.start_mark.line + 1}, {REFUSAL}")


def _tagged(node: yaml.Node, value: Any) -> dict[str, Any]:
    return {"_tag_": node.tag, "_value_": value}
