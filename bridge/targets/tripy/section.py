"""Make, read and check the section `tripy` of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import SourceError, UsageError
from bridge.planning.drafts import without_promise
from bridge.planning.plan import Plan, Step
from bridge.targets.config_json import config_json
from bridge.targets.tripy.formats import CODES, transposed

SECTION = "tripy"
VERSION = 1  # of the section
WRITE = "write one with bridge.convert(model, target='tripy', out=...)"


@dataclass(frozen=True)
class Entry:
    """How one Linear is quantized: Tripy's name of the dtype, the axis of the scales, the companions.

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
    """dtype of the model, its quantized modules by name, and tensors that have a second name.

    `snapped`: every quantized weight is a code times its stored scale, so that Q/DQ gives the codes of the calibration.
    """

    dtype: str
    snapped: bool
    modules: Mapping[str, Entry]
    copies: Mapping[str, str]


def config_file(plan: Plan, config: Mapping[str, Any]) -> bytes:
    """The source's config with the section `tripy`; tensors written under each name are no longer tied."""
    config = without_promise(config, ())  # Tripy's models draft nothing
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", SECTION)}
    section = {"format": VERSION, **asdict(section_of(plan))}
    return config_json(plain | {SECTION: section}, None, untied=bool(plan.untied))


def section_of(plan: Plan) -> Section:
    """The section of the output that a plan describes."""
    first: dict[str, str] = {}
    plain = [(step.source, step.outputs[0].spec.name) for step in plan.steps if not step.format]
    for source, name in plain:
        first.setdefault(source, name)
    return Section(
        plan.options["dtype"],
        bool(plan.quantized),
        {step.outputs[0].spec.name.removesuffix(".weight"): _entry_of(step) for step in plan.quantized},
        {name: first[source] for source, name in plain if name != first[source]},
    )


def _entry_of(step: Step) -> Entry:
    assert step.format
    first, parts = step.format.weight[0], {output.part for output in step.outputs}
    return Entry(
        quant_dtype=CODES[first.dtype],
        weight_quant_dim=0 if first.per == "channel" else None,
        layout="in_out" if transposed(step.format) else "out_in",
        block=first.block[0] if first.block else None,
        input_scale="input_scale" in parts,
        pre_quant_scale="pre_quant_scale" in parts,
    )


def read_section(directory: str | Path) -> tuple[Section, dict[str, Any]]:
    """Return the section and the whole content of `directory`/config.json; SourceError if it is not target tripy's.

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
    return Section(raw["dtype"], raw["snapped"], modules, copies), config


def _entry(path: Path, name: str, row: Any) -> Entry:
    known = {field.name for field in fields(Entry)}
    if not isinstance(row, dict) or row.keys() != known:
        raise SourceError(f"{path}: {SECTION}.modules.{name} must have exactly {', '.join(sorted(known))}")
    if problem := _problem(row):
        raise SourceError(f"{path}: {SECTION}.modules.{name} {problem}: {row}")
    return Entry(**row)


def _problem(row: Mapping[str, Any]) -> str:
    """Why no layer can be built for an entry ("" if one can)."""
    quantized, dim, block, layout = row["quant_dtype"], row["weight_quant_dim"], row["block"], row["layout"]
    if type(row["input_scale"]) is not bool or type(row["pre_quant_scale"]) is not bool:
        return "needs true or false for input_scale and pre_quant_scale"
    if quantized not in CODES.values():
        return f"has an unknown quant_dtype; Tripy has {', '.join(CODES.values())}"
    if dim is not None and (type(dim), dim) != (int, 0):
        return "has a weight_quant_dim that is neither 0 nor null; target tripy writes no other"
    if block is not None and (type(block) is not int or block < 1):
        return "has a block that is not a whole number of 1 or more"
    if block and (quantized != "int4" or dim is not None):
        return "has blocks: Tripy has them for int4 only, and without weight_quant_dim"
    if layout not in ("out_in", "in_out") or (layout == "in_out" and not block):
        return "has a layout that is not out_in, or in_out with a block"
    if quantized == "int4" and row["input_scale"]:
        return "has int4 with an input_scale, but int4 is weight-only"
    return ""
