"""The spelling that ModelOpt's `export_hf_checkpoint` writes: tensors, codings and JSON; reads no weight.

What vLLM, SGLang and TensorRT-LLM load with `quant_method` "modelopt". The facts are those of nvidia-modelopt 0.47.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from bridge.planning import STACKED, Plan, Step
from bridge.quant.scheme import is_static
from bridge.unified import Part
from bridge.unified.config import config_json, untied_head
from bridge.unified.exclude import excluded
from bridge.unified.shards import INDEX, index
from bridge.values import Coding, Format, Numeric, Site

# The version of the contract: runtimes ask who wrote a checkpoint in order to know what its fields mean.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
AWQ = {"has_zero_point": False, "pre_quant_scale": True}  # INT4 without AWQ says so as well  # sic
# (weight numerics, input numeric) -> what a runtime calls it, whether it tells the block.
ALGORITHMS: dict[tuple[str, str], tuple[str, bool]] = {
    ("fp8 tensor", "fp8 tensor"):              ("FP8", False),
    ("fp8 channel", "fp8 token dynamic"):      ("FP8_PER_CHANNEL_PER_TOKEN", False),
    ("fp8 block 128 128", "none"):             ("fp8_pb_wo", False),  # sic
    ("int8 channel", "int8 tensor"):           ("W8A8_SQ_PER_CHANNEL", False),
    ("int8 channel", "none"):                  ("W8A16", False),
    ("int4 block", "none"):                    ("W4A16_AWQ", True),
    ("int4 block, fp8 tensor", "fp8 tensor"):  ("W4A8_AWQ", True),
    ("fp4 block 16 e4m3", "none"):             ("W4A16_NVFP4", True),
    ("fp4 block 16 e4m3", "fp4 block 16 e4m3 dynamic"): ("NVFP4", True),
    ("fp8 block 32 e8m0", "fp8 block 32 e8m0 dynamic"): ("MXFP8", True),
    ("fp4 block 32 e8m0", "none"):             ("W4A16_MXFP4", True),  # TensorRT-LLM's name; ModelOpt says mxfp4
}  # fmt: skip
SHORT = {"float8_e4m3fn": "fp8", "float4_e2m1fn": "fp4", "float8_e8m0fnu": "e8m0"}
PACKED = ("int4", "float4_e2m1fn")
TILE = 128
TILE_AXES = 4  # of the scales of tiles, two of them of one


def setting(format_: Format) -> dict[str, Any]:
    """Return what the JSON says of a module in this format; {} where no runtime has a name for it."""
    found = ALGORITHMS.get(_words(format_))
    if not found:
        return {}
    name, tells = found
    said: dict[str, Any] = {"quant_algo": name}
    if tells:
        said["group_size"] = format_.weight[0].block[-1]
    return said | (AWQ if "AWQ" in name else {})


def has_second(format_: Format) -> bool:
    """Whether a scale stands above the first: that of all NVFP4 blocks, or of W4A8's FP8."""
    return len(format_.weight) == 2 or format_.weight[0].scale_dtype == "float8_e4m3fn"


def refuse(format_: Format) -> str:
    """Why no unified checkpoint can carry this format ("" if it can)."""
    weight, entry = _words(format_)
    if not setting(format_):
        known = ", ".join(name for name, _ in ALGORITHMS.values())
        return f"a unified checkpoint has no word for weights in {weight} with inputs in {entry}; it knows {known}"
    if format_.prescales and "NVFP4" in setting(format_)["quant_algo"]:
        return "NVFP4 after smoothing is not written; use nvfp4 or nvfp4_wo"
    return ""


def refuse_stack(format_: Format, site: Site) -> str:
    """Why experts that one tensor holds cannot be written so ("" if they can).

    Of the other formats ModelOpt writes what no runtime can multiply by: one scale an expert where it says one a row,
    blocks along `out`; or it raises.
    """
    if site.layout == "stack_out_in":
        return f"{STACKED} where each lies [out, in]"
    if setting(format_)["quant_algo"] in ("FP8", "NVFP4", "W4A16_NVFP4"):
        return ""
    return f"{STACKED} in {_words(format_)[0]}: fp8, nvfp4 and nvfp4_wo are"


def refuse_kv(kv: Numeric) -> str:
    """Why the KV cache cannot be quantized so ("" if it can)."""
    if (kv.dtype, kv.per) == ("float8_e4m3fn", "tensor"):
        return ""
    return f"unified checkpoints hold KV scales of FP8 only, not of {_word(kv)}; use kv='fp8'"


def misfits(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    """What of a weight [out, in] does not fit the format, each with its remedy."""
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
            problems.append(f"out = {out} is no multiple of {TILE}: a tile would span gate and up, held as one; {keep}")
    return problems


def coding(format_: Format, site: Site, dtype: str, export: str) -> Coding:
    """How codes and scales are spelled: ModelOpt rounds the weight to the export dtype, and so FP8 quotients too.

    Not those of stacks, which it divides by a scale of one axis: torch keeps the wider dtype then.
    """
    first = format_.weight[0]
    rounded = (first.dtype, first.per) == ("float8_e4m3fn", "tensor") and not site.stacked
    return Coding(
        cast=export if export != dtype else "",
        packed="out" if first.dtype == "int4" else "in",
        quotient="weight" if rounded else "float32",
    )


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    """The tensors of a module whose weight is [out, in]: the codes first, then its companions in their order."""
    first, module = format_.weight[0], site.module
    if site.stacked:
        return _stack_parts(format_, module, shape)
    out, in_ = shape
    codes = (out // 2, in_) if first.dtype == "int4" else (out, in_ // 2) if first.dtype in PACKED else shape
    stored = "uint8" if first.dtype in PACKED else first.dtype
    found = [Part("weight", f"{module}.weight", codes, stored), _scale(first, module, shape)]
    entry = [Part("input_scale", f"{module}.input_scale", (), "float32")] if _has_input_scale(format_) else []
    second = [Part("scale_2", f"{module}.weight_scale_2", (), "float32")] if has_second(format_) else []
    found += [*second, *entry] if site.expert is not None else [*entry, *second]
    if format_.prescales and not folded:
        found.append(Part("pre_quant_scale", f"{module}.pre_quant_scale", (in_,), dtype))
    return found


def _stack_parts(format_: Format, name: str, shape: tuple[int, ...]) -> list[Part]:
    """The tensors of experts [experts, in, out]; blocks lie along `in`, as do the two codes of a byte."""
    experts, in_, out = shape
    first = format_.weight[0]
    scale: tuple[int, ...] = ()
    if first.block:
        shape, scale = (experts, in_ // 2, out), (experts, in_ // first.block[0], out)
    found = [Part("weight", name, shape, "uint8" if first.dtype in PACKED else first.dtype)]
    found.append(Part("scale", f"{name}_weight_scale", scale, first.scale_dtype))
    found += [Part("input_scale", f"{name}_input_scale", (), "float32")] if _has_input_scale(format_) else []
    return found + ([Part("scale_2", f"{name}_weight_scale_2", (), "float32")] if has_second(format_) else [])


def kv_parts(attention: str, dtype: str) -> list[Part]:
    """The scales of keys and values, beside their projections whether the model has such modules or not."""
    names = {letter: f"{attention}.{letter}_proj.{letter}_scale" for letter in ("k", "v")}
    return [Part(f"{letter}_scale", name, (), "float32") for letter, name in names.items()]


def unifies(format_: Format) -> bool:
    """All but FP8 per tensor: there q, k, v keep scales of their own, and only input scales agree."""
    return bool(setting(format_)["quant_algo"] != "FP8")


def joins(format_: Format) -> bool:
    """Always: ModelOpt quantizes the matrix that holds both."""
    return True


def folds(format_: Format) -> bool:
    """AWQ's pre-scales are multiplied into the norm before a group, SmoothQuant's are not."""
    return format_.algorithm == "awq"


def beside(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json, hf_quant_config.json and, of a divided checkpoint, the index."""
    found: dict[str, bytes] = {}
    quantization = hf_quant_config(plan)
    said = quantization_config(quantization) if quantization else None
    if quantization:
        found["hf_quant_config.json"] = json.dumps(quantization, indent=4).encode()
    found["config.json"] = config_json(config, said, untied_head(plan))
    if len(plan.files) > 1:
        found[INDEX] = index(plan.files, parameters(plan))
    return found


def parameters(plan: Plan) -> int:
    """Elements as they are stored, without scales, as `num_parameters` of the packed model counts them."""
    return sum(output.spec.size for output in plan.outputs if output.part == "weight")


def hf_quant_config(plan: Plan) -> dict[str, Any]:
    """The content of hf_quant_config.json; {} where nothing is quantized."""
    layers = {step.site.module: setting(_told(step)) for step in plan.quantized if step.site}
    kv = any(output.part == "k_scale" for output in plan.outputs)
    if not layers and not kv:
        return {}
    said: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if kv else None}
    settings = {json.dumps(layer) for layer in layers.values()}
    if len(settings) == 1:
        said |= json.loads(settings.pop()) | {"exclude_modules": excluded(plan)}
    else:
        said |= {"quant_algo": "MIXED_PRECISION" if layers else None, "quantized_layers": _containers(layers)}
    return {"producer": PRODUCER, "quantization": said}


def quantization_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same for config.json, in the words of compressed-tensors as far as those reach."""
    inner = content["quantization"]
    algo, layers = inner["quant_algo"], inner.get("quantized_layers", {})
    said: dict[str, Any] = {}
    if algo == "MIXED_PRECISION":
        said |= {"config_groups": _mixed_groups(layers), "quantized_layers": layers}
    elif algo in ("FP8", "NVFP4", "W4A16_NVFP4"):
        said["config_groups"] = {"group_0": _group(algo, inner.get("group_size")) | {"targets": ["Linear"]}}
    said["ignore"] = inner.get("exclude_modules", [])
    if algo:
        said["quant_algo"] = algo
    if inner["kv_cache_quant_algo"]:
        said["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return said | {"producer": content["producer"], "quant_method": "modelopt"}


def _told(step: Step) -> Format:
    """The format of a step as the scheme has it: a tile that covers a weight shares the scale of its group."""
    assert step.format
    first, scale = step.format.weight[0], next((o for o in step.outputs if o.part == "scale"), None)
    if scale is None or first.per != "tensor" or len(scale.spec.shape) < TILE_AXES:
        return step.format
    return dataclasses.replace(step.format, weight=(Numeric(first.dtype, "block", (TILE, TILE)),))


def _words(format_: Format) -> tuple[str, str]:
    return ", ".join(_word(numeric) for numeric in format_.weight), _word(format_.input)


def _word(numeric: Numeric | None) -> str:
    if numeric is None:
        return "none"
    free = numeric.dtype == "int4"  # the block of INT4 is told to the runtime, the others are fixed
    words = [SHORT.get(numeric.dtype, numeric.dtype), numeric.per, *map(str, () if free else numeric.block)]
    if numeric.scale_dtype != "float32":
        words.append({"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}.get(numeric.scale_dtype, numeric.scale_dtype))
    return " ".join([*words, *(["dynamic"] if numeric.dynamic else [])])


def _tiles(numeric: Numeric) -> bool:
    return numeric.per == "block" and len(numeric.block) == 2


def _has_input_scale(format_: Format) -> bool:
    return format_.input is not None and is_static(format_.input)


def _scale(first: Numeric, module: str, shape: tuple[int, ...]) -> Part:
    out, in_ = shape
    dtype = "uint8" if first.scale_dtype == "float8_e8m0fnu" else first.scale_dtype
    sizes: tuple[int, ...] = {"tensor": (), "channel": (out,)}.get(first.per, (out, in_ // (first.block or (1,))[-1]))
    if _tiles(first):
        sizes = (-(-out // first.block[0]), 1, -(-in_ // first.block[1]), 1)
    return Part("scale", f"{module}.weight_scale", sizes, dtype)


def _containers(layers: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layers by module; the experts of a block, which the model holds as one module, under the block's name."""
    named: dict[str, dict[str, Any]] = {}
    held: dict[str, set[str]] = {}
    for module, said in layers.items():
        held.setdefault(_block(module), set()).add(json.dumps(said))
    for module, said in layers.items():
        named[_block(module) if len(held[_block(module)]) == 1 else module] = said
    return named


def _block(module: str) -> str:
    block, experts, _ = module.partition(".experts.")
    return f"{block}.experts" if experts else module


def _mixed_groups(layers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    grouped: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for module, said in layers.items():
        grouped.setdefault(tuple(sorted(said.items())), []).append(module)
    return {
        f"group_{at}": _group(dict(key)["quant_algo"], dict(key).get("group_size")) | {"targets": sorted(modules)}
        for at, (key, modules) in enumerate(grouped.items())
    }


def _group(algo: str, block: int | None) -> dict[str, Any]:
    """One of `config_groups`; MXFP4 and tiles of FP8 have no such words, they say their algorithm."""
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
        "MXFP8": (eight | size, eight | size),
    }
    if algo not in known:
        return {"quant_algo": algo}
    entry, weight = known[algo]
    static = {"dynamic": False}  # sic: of tokens as well
    return ({"input_activations": static | entry} if entry else {}) | {"weights": static | weight}
