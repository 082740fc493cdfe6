"""The spelling of ModelOpt's `export_hf_checkpoint`, as of nvidia-modelopt 0.47.

vLLM, SGLang and TensorRT-LLM load it with `quant_method` "modelopt". For the functions see `Spelling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridge.core.text import grouped
from bridge.core.values import Encoding, Format, Numeric, Site
from bridge.core.version import __version__
from bridge.planning.plan import TILE, Plan
from bridge.quant.describe import explained, numeric_words
from bridge.sources.configs.diffusion import is_diffusion
from bridge.targets.config_json import config_json
from bridge.targets.hf.spelling import Part, Traits
from bridge.targets.modelopt_format import (
    ALGORITHMS,
    PRODUCER,
    class_prefixes,
    excluded,
    format_words,
    has_second,
    setting,
)

TRAITS = Traits(
    prescales=True, mixes=True, stacks=class_prefixes("stacked_experts"), fuses=class_prefixes("fused_prescales")
)
PACKED = ("int4", "float4_e2m1fn")


def why_unsupported(format_: Format) -> str:
    """Why no unified checkpoint can hold this format ("" if one can)."""
    weight, entry = format_words(format_)
    if not setting(format_):
        known = ", ".join(dict.fromkeys(name for name, _ in ALGORITHMS.values()))
        return f"a unified checkpoint has no algorithm for {explained(f'{weight} | {entry}')}; known: {known}"
    name = setting(format_)["quant_algo"]
    if format_.prescales and "NVFP4" in name and (name, format_.algorithm) != ("NVFP4_AWQ", "awq"):
        return f"{name} after {format_.algorithm} has no name in unified checkpoints; use nvfp4_awq, nvfp4 or nvfp4_wo"
    return ""


def holds_stack(format_: Format) -> bool:
    return setting(format_)["quant_algo"] in ("FP8", "NVFP4", "W4A16_NVFP4")


def why_kv_unsupported(kv: Numeric) -> str:
    if (kv.dtype, kv.per) == ("float8_e4m3fn", "tensor"):
        return ""
    return f"unified checkpoints hold KV scales of FP8 only, not of {explained(numeric_words(kv))}; use kv='fp8'"


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    out, in_ = shape
    keep = 'keep these modules with a recipe (quant = "none")'
    problems = []
    for numeric in format_.weight:
        across = numeric.block[-1] if numeric.per == "block" else 1
        if in_ % across and not _tiles(numeric):
            problems.append(f"in = {in_} does not divide into blocks of {across}, and no runtime pads them; {keep}")
        if numeric.dtype == "int4" and out % 2:
            problems.append(f"out = {out} is odd: int4 codes of two rows share a byte; {keep}")
        if _tiles(numeric) and site.shares and out % TILE:
            problems.append(
                f"out = {out} is not a multiple of {TILE}: a tile would span gate and up, which are one matrix; {keep}"
            )
    return problems


def coding(format_: Format, site: Site, dtype: str, export: str) -> Encoding:
    """The encoding of a weight: ModelOpt rounds it to the export dtype, and FP8 quotients as well.

    It does not round the quotients of stacks, since it divides them by a scale of one axis: torch keeps the wider
    dtype then.
    """
    first = format_.weight[0]
    rounded = (first.dtype, first.per) == ("float8_e4m3fn", "tensor") and not site.stacked
    return Encoding(
        cast=export if export != dtype else "",
        packed="out" if first.dtype == "int4" else "in",
        quotient="weight" if rounded else "float32",
    )


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    """The tensors of a module whose weight is [out, in]: codes first, then its companions in their order."""
    first, module = format_.weight[0], site.module
    prefix = f"{module}_" if site.stacked else f"{module}."
    static = format_.input is not None and format_.input.static
    entry = [Part("input_scale", f"{prefix}input_scale", (), "float32")] if static else []
    second = [Part("scale_2", f"{prefix}weight_scale_2", (), "float32")] if has_second(format_) else []
    stored = "uint8" if first.dtype in PACKED else first.dtype
    if site.stacked:
        return [*_stack_parts(first, stored, module, shape), *entry, *second]
    out, in_ = shape
    codes = (out // 2, in_) if first.dtype == "int4" else (out, in_ // 2) if first.dtype in PACKED else shape
    tensors = [Part("weight", f"{module}.weight", codes, stored), _scale(first, module, shape)]
    tensors += [*second, *entry] if site.expert is not None else [*entry, *second]
    if format_.prescales and not folded:
        tensors.append(Part("pre_quant_scale", f"{module}.pre_quant_scale", (in_,), dtype))
    return tensors


def _stack_parts(first: Numeric, stored: str, name: str, shape: tuple[int, ...]) -> list[Part]:
    """Codes and scales of experts [experts, in, out]; blocks and the two codes of a byte lie along `in`."""
    experts, in_, out = shape
    scale: tuple[int, ...] = ()
    if first.block:
        shape, scale = (experts, in_ // 2, out), (experts, in_ // first.block[0], out)
    return [Part("weight", name, shape, stored), Part("scale", f"{name}_weight_scale", scale, first.scale_dtype)]


def kv_parts(attention: str, dtype: str) -> list[Part]:
    """The KV scales, named after k_proj and v_proj even if the model has no such modules."""
    names = {letter: f"{attention}.{letter}_proj.{letter}_scale" for letter in ("k", "v")}
    return [Part(f"{letter}_scale", name, (), "float32") for letter, name in names.items()]


def unifies(format_: Format) -> bool:
    """All formats but FP8 per tensor: ModelOpt gives q, k and v their own weight scales there."""
    return bool(setting(format_)["quant_algo"] != "FP8")


def joins(format_: Format) -> bool:
    """Always: ModelOpt quantizes both as one matrix."""
    return True


def config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json and, if something is quantized in a model of transformers, hf_quant_config.json."""
    quantization = hf_quant_config(plan)
    if not quantization:
        return {"config.json": config_json(config, None, bool(plan.untied))}
    section = config_json(config, quantization_config(quantization), bool(plan.untied))
    if is_diffusion(config):  # ModelOpt's export of diffusers writes no other file
        return {"config.json": section}
    content = {**quantization, "written_by": f"qbridge {__version__}"}  # `producer` is the format's
    return {"hf_quant_config.json": json.dumps(content, indent=4).encode(), "config.json": section}


def hf_quant_config(plan: Plan) -> dict[str, Any]:
    """The content of hf_quant_config.json; {} if nothing is quantized."""
    formats = [(step.site, step.scheme_format) for step in plan.quantized if step.site]
    layers = {module: setting(format_) for site, format_ in formats if format_ for module in (site.module, *site.asked)}
    kv = any(output.part == "k_scale" for output in plan.outputs)
    if not layers and not kv:
        return {}
    quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if kv else None}
    by_name = {layer["quant_algo"]: layer for layer in layers.values()}
    if set(by_name) == {"NVFP4", "NVFP4_AWQ"}:  # the same without a pre_quant_scale; SGLang reads one name
        layers = dict.fromkeys(layers, by_name["NVFP4_AWQ"])
    settings = {json.dumps(layer) for layer in layers.values()}
    if len(settings) == 1:
        quantization |= json.loads(settings.pop()) | {"exclude_modules": excluded(plan)}
    else:
        quantization |= {"quant_algo": "MIXED_PRECISION" if layers else None, "quantized_layers": _containers(layers)}
    return {"producer": PRODUCER, "quantization": quantization}


def quantization_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same for config.json, with compressed-tensors' `config_groups` for formats that have them."""
    inner = content["quantization"]
    algo, layers = inner["quant_algo"], inner.get("quantized_layers", {})
    section: dict[str, Any] = {}
    if algo == "MIXED_PRECISION":
        section |= {"config_groups": _mixed_groups(layers), "quantized_layers": layers}
    elif algo in ("FP8", "NVFP4", "W4A16_NVFP4"):
        section["config_groups"] = {"group_0": _group(algo, inner.get("group_size")) | {"targets": ["Linear"]}}
    section["ignore"] = inner.get("exclude_modules", [])
    if algo:
        section["quant_algo"] = algo
    if inner["kv_cache_quant_algo"]:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return section | {"producer": content["producer"], "quant_method": "modelopt"}


def _tiles(numeric: Numeric) -> bool:
    return numeric.per == "block" and len(numeric.block) == 2


def _scale(first: Numeric, module: str, shape: tuple[int, ...]) -> Part:
    out, in_ = shape
    dtype = "uint8" if first.scale_dtype == "float8_e8m0fnu" else first.scale_dtype
    sizes: tuple[int, ...] = {"tensor": (), "channel": (out,)}.get(first.per, (out, in_ // (first.block or (1,))[-1]))
    if _tiles(first):
        sizes = (-(-out // first.block[0]), 1, -(-in_ // first.block[1]), 1)
    return Part("scale", f"{module}.weight_scale", sizes, dtype)


def _containers(layers: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layers by module; the experts of a block, which are one module in the model, under the block's name."""
    entries: dict[str, set[str]] = {}
    for module, entry in layers.items():
        entries.setdefault(_block(module), set()).add(json.dumps(entry))
    return {_block(module) if len(entries[_block(module)]) == 1 else module: entry for module, entry in layers.items()}


def _block(module: str) -> str:
    block, experts, _ = module.partition(".experts.")
    return f"{block}.experts" if experts else module


def _mixed_groups(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for number, modules in enumerate(grouped(layers, lambda module: tuple(sorted(layers[module].items())))):
        entry = layers[modules[0]]
        groups[f"group_{number}"] = _group(entry["quant_algo"], entry.get("group_size")) | {"targets": sorted(modules)}
    return groups


def _group(algo: str, block: int | None) -> dict[str, Any]:
    """One of `config_groups`; MXFP4 and tiles of FP8 have no such fields and name their algorithm instead."""
    size = {"group_size": block} if block else {}
    eight, four = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
    integer = {"num_bits": 8, "type": "int"}
    channel = {"strategy": "channel"}
    known: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
        "FP8": (eight, eight),
        "FP8_PER_CHANNEL_PER_TOKEN": (eight, eight | channel),
        "W8A8_SQ_PER_CHANNEL": (integer, integer | channel),
        "W8A16": (None, integer),
        "W4A16_AWQ": (None, {"num_bits": 4, "type": "int"} | size),
        "W4A8_AWQ": (eight | size, four | size),  # sic: its codes are integers
        "W4A16_NVFP4": (None, four | size),
        "NVFP4": (four | size, four | size),
        "NVFP4_AWQ": (eight | size, four | size),  # sic: activations are FP4
        "W4A8_NVFP4_FP8": (eight, four | size),
        "MXFP8": (eight | size, eight | size),
    }
    if algo not in known:
        return {"quant_algo": algo}
    entry, weight = known[algo]
    static = {"dynamic": False}  # sic: for tokens as well
    return ({"input_activations": static | entry} if entry else {}) | {"weights": static | weight}
