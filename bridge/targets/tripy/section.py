"""What the section "tripy" of a written config.json says, read back and checked; knows no framework and no module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bridge.dtypes import FLOATS
from bridge.errors import SourceError, UsageError
from bridge.tripy.config import SECTION, VERSION
from bridge.tripy.formats import CODES

WRITE = "write one with bridge.convert(model, target='tripy', out=...)"


@dataclass(frozen=True)
class Entry:
    """How one Linear is quantized: its dtype in Tripy's words, along which axis its scales lie, what stands beside it.

    `layout` "in_out": int4 in blocks of `block` along `in`, stored [in, out]; "out_in" with a `block`: along `out`.
    """

    quant_dtype: str
    weight_quant_dim: int | None
    layout: str
    block: int | None
    input_scale: bool
    pre_quant_scale: bool


@dataclass(frozen=True)
class Section:
    """dtype of the model, its quantized modules by name, and tensors that are written again under a second name.

    `snapped`: every quantized weight is a code times its scale.
    """

    dtype: str
    modules: Mapping[str, Entry]
    copies: Mapping[str, str]
    snapped: bool


def read_section(directory: str | Path) -> tuple[Section, dict[str, Any]]:
    """Return the section and the whole content of `directory`/config.json; SourceError where it is not target tripy's.

    >>> read_section("tiny-gpt2-int8")[0].dtype  # doctest: +SKIP
    'float32'
    """
    if not isinstance(directory, str | Path):
        raise UsageError(
            "the first argument is the directory that target tripy wrote, as in load(directory, module); "
            f"not {type(directory).__name__}"
        )
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}; {WRITE}") from error
    except ValueError as error:
        raise SourceError(f"{path}: not JSON: {error}") from error
    raw = config.get(SECTION) if isinstance(config, dict) else None
    if not isinstance(raw, dict):
        raise SourceError(f"{path}: has no section {SECTION!r}, so target tripy did not write it; {WRITE}")
    if raw.get("format") != VERSION:
        raise SourceError(f"{path}: format {raw.get('format')!r} of section {SECTION!r}; this version reads {VERSION}")
    if raw.get("dtype") not in FLOATS:
        raise SourceError(f"{path}: dtype {raw.get('dtype')!r} of section {SECTION!r}; known: {', '.join(FLOATS)}")
    rows, copies = raw.get("modules"), raw.get("copies")
    if not isinstance(rows, dict) or not isinstance(copies, dict) or type(raw.get("snapped")) is not bool:
        raise SourceError(f"{path}: section {SECTION!r} lacks modules, copies or snapped; {WRITE}")
    if not all(isinstance(first, str) for first in copies.values()):
        raise SourceError(f"{path}: {SECTION}.copies must map names to names; {WRITE}")
    modules = {name: _entry(path, name, row) for name, row in rows.items()}
    return Section(raw["dtype"], modules, copies, raw["snapped"]), config


def _entry(path: Path, name: str, row: Any) -> Entry:
    known = {field.name for field in fields(Entry)}
    if not isinstance(row, dict) or row.keys() != known:
        raise SourceError(f"{path}: {SECTION}.modules.{name} must have exactly {', '.join(sorted(known))}")
    if problem := _nonsense(row):
        raise SourceError(f"{path}: {SECTION}.modules.{name} {problem}: {row}")
    return Entry(**row)


def _nonsense(row: Mapping[str, Any]) -> str:
    """What no layer can be built for, "" for an entry that makes sense."""
    quantized, dim, block, layout = row["quant_dtype"], row["weight_quant_dim"], row["block"], row["layout"]
    if type(row["input_scale"]) is not bool or type(row["pre_quant_scale"]) is not bool:
        return "says neither true nor false of its input_scale and pre_quant_scale"
    if quantized not in CODES.values():
        return f"has a quant_dtype that Tripy has not; known: {', '.join(CODES.values())}"
    if dim is not None and (type(dim), dim) != (int, 0):
        return "has a weight_quant_dim that is neither 0 nor null; target tripy writes no other"
    if block is not None and (type(block) is not int or block < 1):
        return "has a block that is no whole number of 1 or more"
    if block and (quantized != "int4" or dim is not None):
        return "has blocks: Tripy has them for int4 only, and without weight_quant_dim"
    if layout not in ("out_in", "in_out") or (layout == "in_out" and not block):
        return "has a layout that is not out_in, or in_out with a block"
    if quantized == "int4" and row["input_scale"]:
        return "has int4 beside an input_scale, and int4 is weight-only"
    return ""
