"""Read what llama.cpp's graphs and tokenizers are, from `mappings/runtimes/llama.cpp.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bridge.core.mappings import TableFile, find_table_file, read_table
from bridge.core.text import nearest
from bridge.tables.expressions.grammar import Formula, parse_formula

_KINDS: dict[str, type] = {  # of a graph's keys
    "name": str, "refused": str, "eps": str, "rms": bool, "activation": str, "activations": list, "biases": list,
    "rotary": bool, "theta": float, "local_theta": float, "rotary_share": float, "scalings": list, "every": int,
    "window": bool, "root_layers": int, "softcaps": dict, "original_context": bool, "gating": str, "counts": dict,
    "numbers": dict, "switches": dict, "refuse": dict, "second_scale": bool, "seventy": str,
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """One architecture of `mappings/runtimes/llama.cpp.toml`: what llama.cpp's graph of it fixes."""

    name: str = ""  # in llama.cpp, as "qwen3moe"
    refused: str = ""  # why target gguf does not write it, though llama.cpp has a graph; then nothing else is given
    eps: str = "rms_norm_eps"  # the config's name of the norms' epsilon
    rms: bool = True  # whether norms are RMS norms
    activation: str = "hidden_act"  # the config's name of the activation
    activations: tuple[str, ...] = ("silu",)  # of the MLP
    biases: tuple[str, ...] = ()  # roles of the biases that llama.cpp's loader reads
    rotary: bool = True  # whether positions are rotary
    theta: float = 1e4  # of a config without one
    local_theta: float = 0.0  # of the layers with a window, whatever the config says; 0 if the config decides
    rotary_share: float = 1.0  # part of a head that turns, of a config without partial_rotary_factor
    scalings: tuple[str, ...] = ("linear",)  # kinds of rotary scaling that are written
    every: int = 0  # each such layer attends to everything, the others to a window; 0 if all do
    window: bool = True  # whether layers have a window if the config says nothing of use_sliding_window
    root_layers: int = 0  # layers of the one size with attention divided by the root of hidden / heads, not head_dim
    softcaps: Mapping[str, float] = field(default_factory=dict)  # fields of capped logits -> llama.cpp's own values
    original_context: bool = False  # whether llama.cpp reads the context before scaling
    gating: str = "softmax"  # what makes scores of experts of logits, in a file without expert_gating_func
    counts: Mapping[str, Formula] = field(default_factory=dict)  # more keys: uint32, over dims and config fields
    numbers: Mapping[str, Formula] = field(default_factory=dict)  # float32
    switches: Mapping[str, Formula] = field(default_factory=dict)  # bool
    refuse: tuple[tuple[Formula, str], ...] = ()  # conditions on dims and config fields, each with the problem
    seventy: Formula | None = None  # whether llama.cpp calls it a 70B model, whose file types differ
    second_scale: bool = False  # whether it multiplies by NVFP4's scale of the tensor; others load it and leave it out


@cache
def graphs() -> Mapping[str, Graph]:
    """Architecture -> llama.cpp's graph of it, of all that have a table here."""
    return read_graphs(_table())


def read_graphs(file: TableFile) -> dict[str, Graph]:
    """Parse `[graphs]`; TableError names a wrong row."""
    return {name: _graph(file, f"graphs.{name}", row) for name, row in file.section("graphs").items()}


def _graph(file: TableFile, section: str, row: Mapping[str, Any]) -> Graph:
    given: dict[str, Any] = {}
    for key, value in row.items():
        if key not in _KINDS:
            raise file.place(section, key).error(f"unknown key `{key}`", hint=nearest(key, _KINDS))
        if type(value) is not _KINDS[key]:
            raise file.place(section, key).error(f"`{key}` is a {_KINDS[key].__name__}, not {value!r}")
        given[key] = tuple(value) if isinstance(value, list) else value
    if "seventy" in given:
        given["seventy"] = parse_formula(given["seventy"], file.place(section, "seventy"))
    for key in ("counts", "numbers", "switches"):
        texts = file.texts(f"{section}.{key}")
        given[key] = {name: parse_formula(text, file.place(f"{section}.{key}", name)) for name, text in texts.items()}
    conditions = file.texts(f"{section}.refuse")
    refuse = ((parse_formula(text, file.place(f"{section}.refuse", text)), why) for text, why in conditions.items())
    return Graph(**given | {"refuse": tuple(refuse)})


@cache
def token_rows(section: str) -> Mapping[str, Any]:
    """A section of `[tokens]`: `required`, `models`, `splits`, `merging`, `begins`, `normalized` or `same`."""
    return _table().section(f"tokens.{section}")


@cache
def _table() -> TableFile:
    path = find_table_file("runtimes", "llama.cpp")
    assert path
    return read_table(path)
