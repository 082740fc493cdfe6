"""Tasks of models and the classes that have their heads: `mappings/tasks.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, read_table

FILE = "tasks.toml"


@dataclass(frozen=True)
class Task:
    """One exported head, a row of the table: `classes` are endings of the architectures that have it.

    `auto`: the auto-mapping in transformers that lists its classes. `pairs`: of two towers, the axes of texts, and of
    images or sounds. `parts`: graphs of one task, each in a file of its own; () for one graph.
    """

    classes: tuple[str, ...]
    auto: str = ""
    inputs: tuple[str, ...] = ()  # inputs that the model's `forward` lacks are left out
    outputs: tuple[str, ...] = ("logits",)  # outputs that the model does not return are left out
    cached: bool = False
    pairs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@cache
def _table() -> Mapping[str, Any]:
    return read_table(mappings() / FILE).data


@cache
def tasks() -> Mapping[str, Task]:
    """Every task by name. The first with an ending of an architecture is its own."""
    rows = _table()["tasks"]
    try:
        return {name: Task(**{key: _frozen(value) for key, value in row.items()}) for name, row in rows.items()}
    except TypeError as error:
        raise TableError(f"mappings/{FILE}: {error}") from error


def classes_of(*names: str) -> tuple[str, ...]:
    """Endings of the classes that have the head of one of these tasks.

    >>> classes_of("causal-lm")
    ('ForCausalLM', 'LMHeadModel')
    """
    return tuple(ending for name in names for ending in tasks()[name].classes)


def listed(section: str, key: str) -> tuple[str, ...]:
    """A list of model types or classes of another section of the table, as `listed("ort", "classes")`."""
    return tuple(_table()[section][key])


def why_without(architecture: str) -> str:
    """Why there are no graphs of a class that writes; "" if there are."""
    return str(_table()["without"].get(architecture, ""))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
