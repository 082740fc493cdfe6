"""Check a written directory against the contract of unified checkpoints.

Only its files are read. The contract is what vLLM, SGLang and TensorRT-LLM read from a checkpoint with `quant_method`
"modelopt": the tensors of a quantized module, their dtypes and shapes, and the JSON fields that describe them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.text import fold_layers
from bridge.core.values import TensorSpec
from bridge.planning.drafts import lacking
from bridge.planning.eagle import eagle_problems, is_eagle
from bridge.sources.config_json import read_json
from bridge.sources.configs.diffusion import is_diffusion
from bridge.targets.hf.shards import Names, names_for


class Rule(NamedTuple):
    """Requirements on a module of one algorithm: dtypes, and how `out` and `in` of codes and scale relate."""

    codes: str
    scale: str
    per: str  # "tensor", "channel", "tile", "block"
    packs: tuple[int, int] = (1, 1)  # values along `out` and along `in` that share one stored element
    second: bool = False
    entry: bool = False


DRAFTS = (
    "error [drafts] draft layers are not whole: {what}; convert the whole checkpoint, or with drafts='drop' "
    "(--drafts drop)"
)
ABSENT = "error [config] hf_quant_config.json cannot be read: there is none"
RULES = {
    "FP8": Rule("float8_e4m3fn", "float32", "tensor", entry=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Rule("float8_e4m3fn", "float32", "channel"),
    "fp8_pb_wo": Rule("float8_e4m3fn", "float32", "tile"),
    "W8A8_SQ_PER_CHANNEL": Rule("int8", "float32", "channel", entry=True),
    "W8A16": Rule("int8", "float32", "channel"),
    "W4A16_AWQ": Rule("uint8", "float32", "block", (2, 1)),
    "W4A8_AWQ": Rule("uint8", "float32", "block", (2, 1), second=True, entry=True),
    "W4A16_NVFP4": Rule("uint8", "float8_e4m3fn", "block", (1, 2), second=True),
    "NVFP4": Rule("uint8", "float8_e4m3fn", "block", (1, 2), second=True, entry=True),
    "NVFP4_AWQ": Rule("uint8", "float8_e4m3fn", "block", (1, 2), second=True, entry=True),
    "W4A8_NVFP4_FP8": Rule("uint8", "float8_e4m3fn", "block", (1, 2), second=True, entry=True),
    "MXFP8": Rule("float8_e4m3fn", "uint8", "block"),
    "W4A16_MXFP4": Rule("uint8", "uint8", "block", (1, 2)),
}
TILE = 128
SCALES = (
    "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "output_scale",
    "pre_quant_scale", "k_scale", "v_scale", "q_scale", "kv_scale",
)  # fmt: skip
SCALARS = ("input_scale", "weight_scale_2", "k_scale", "v_scale")


def lint(directory: Path) -> list[str]:
    """Return a message for each violation of the contract, with layers folded."""
    try:
        config = read_json(directory / "config.json")
        weights = sorted(directory.glob(f"{names_for(config).stem}*.safetensors"))
        files = {path.name: SafetensorsFile(path) for path in weights}
    except (OSError, ValueError, SourceError) as error:
        return [f"error [files] {error}"]
    holder = {name: file for file in files.values() for name in file.specs}
    specs = {name: file.specs[name] for name, file in holder.items()}
    findings = list(_index(directory, {name: list(file.specs) for name, file in files.items()}, names_for(config)))
    findings += [DRAFTS.format(what=what) for what in lacking(config, specs)]
    if config.get("architectures") and is_eagle(config):
        problems = eagle_problems(config, specs, lambda name: holder[name].read(name))
        findings += [f"error [drafts] {problem}" for problem in problems]
    section = config.get("quantization_config")
    if section is None:
        stray = [name for name in specs if name.endswith(SCALES)]
        findings += [f"error [config] {name}: a scale, but config.json has no quantization_config" for name in stray]
    elif section.get("quant_method") == "modelopt":
        findings += () if is_diffusion(config) else _config(directory, section, specs)
        findings += _modules(section, specs | _experts(specs))
        findings += _scalars(holder)
    else:
        findings += _readable(directory)
    return fold_layers(findings)


def _readable(directory: Path) -> Iterator[str]:
    """A checkpoint of another `quant_method` must be complete for our reader: each part in its dtype and shape."""
    from bridge.sources.opening import open_source

    try:
        quantized = open_source(directory).quantized
    except SourceError as error:
        yield from (f"error [tensors] {line.strip()}" for line in str(error).splitlines())
        return
    if quantized is None:
        yield "error [leftover] quantization_config says that weights are quantized, but none is"


def _index(directory: Path, files: Mapping[str, list[str]], known: Names) -> Iterator[str]:
    """A sharded checkpoint has an index that agrees with its files; no tensor is in two files."""
    names = [name for tensors in files.values() for name in tensors]
    if len(set(names)) != len(names):
        yield "error [index] a tensor is in more than one file"
    path = directory / known.index
    if not path.exists():
        if set(files) != {known.single}:
            what = ", ".join(files) or "no weights"
            yield f"error [index] {what}: without {known.index} only {known.single} is loaded"
        return
    try:
        weight_map = read_json(path).get("weight_map")
    except SourceError as error:
        yield f"error [index] {error}; get it again, or remove it and let `qbridge repair` write one"
        return
    if weight_map != {name: file for file, tensors in files.items() for name in tensors}:
        yield f"error [index] {known.index} and the headers of the files disagree"


def _config(directory: Path, section: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Both JSON files exist, name a producer and agree."""
    if not (directory / "hf_quant_config.json").exists():
        yield ABSENT
        return
    try:
        own = json.loads((directory / "hf_quant_config.json").read_text())
        inner = own["quantization"]
    except (OSError, ValueError, KeyError) as error:
        yield f"error [config] hf_quant_config.json cannot be read: {error}"
        return
    if not (isinstance(own.get("producer"), dict) and own["producer"].get("name") and own["producer"].get("version")):
        yield "error [config] hf_quant_config.json: producer needs a name and a version"
    pairs = (("quant_algo", "quant_algo"), ("ignore", "exclude_modules"), ("quantized_layers", "quantized_layers"))
    for ours, theirs in pairs:
        one, other = section.get(ours) or None, inner.get(theirs) or None
        if one != other and not (ours == "ignore" and _listed(one, names) == _listed(other, names)):
            yield f"error [config] {ours} of config.json and {theirs} of hf_quant_config.json disagree"
    if bool(section.get("kv_cache_scheme")) != bool(inner.get("kv_cache_quant_algo")):
        yield "error [config] only one of config.json and hf_quant_config.json names a quantized KV cache"


def _listed(entries: Any, names: Iterable[str]) -> set[str]:
    """The modules that a list with wildcards names."""
    words = [word for word in entries or () if isinstance(word, str)]
    return {m for m in {name.rpartition(".")[0] for name in names} if any(fnmatchcase(m, word) for word in words)}


def _modules(section: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Every quantized module has what its algorithm needs; KV scales exist if the config announces them."""
    layers = section.get("quantized_layers")
    quantized = {name.removesuffix(".weight_scale") for name in specs if name.endswith(".weight_scale")}
    for module in sorted(quantized):
        algo = _layer(layers, module) if layers is not None else section.get("quant_algo")
        rule = RULES.get(str(algo))
        if rule is None:
            yield f"error [algorithm] {module}: has a weight_scale, but its algorithm is {algo!r}"
            continue
        for code, problem in _module(rule, str(algo), module, specs):
            yield f"error [{code}] {module}: {problem}"
        if any(fnmatchcase(module, pattern) for pattern in section.get("ignore", ())):
            yield f"error [ignore] {module}: is quantized, but on the list of unquantized modules"
    kv = [name for name in specs if name.endswith((".k_scale", ".v_scale"))]
    if bool(kv) != bool(section.get("kv_cache_scheme")):
        yield "error [kv] scales of keys and values need kv_cache_scheme, and the reverse; only one of them exists"


def _experts(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Tensors of stacked experts under the names of a module, in the shapes of one expert [out, in]."""
    experts = {}
    for stack in [name.removesuffix("_weight_scale") for name in specs if name.endswith("_weight_scale")]:
        parts = {"weight": stack} | {
            part: f"{stack}_{part}" for part in ("weight_scale", "weight_scale_2", "input_scale")
        }
        for part, name in parts.items():
            if name in specs:
                experts[f"{stack}.{part}"] = replace(specs[name], shape=specs[name].shape[:0:-1])
    return experts


def _layer(layers: Mapping[str, Any], module: str) -> str | None:
    """The algorithm of a module; experts are listed under the name of their block."""
    block = module.partition(".experts.")[0]
    return (layers.get(module) or layers.get(f"{block}.experts") or {}).get("quant_algo")


def _module(rule: Rule, algo: str, module: str, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """Codes and problems: the code is the algorithm, or the part of a module that is missing."""
    codes, scale = specs.get(f"{module}.weight"), specs[f"{module}.weight_scale"]
    if codes is None:
        yield algo, "has a weight_scale, but no weight"
        return
    if (codes.dtype, scale.dtype) != (rule.codes, rule.scale) or len(codes.shape) != 2:
        yield (
            algo,
            f"weight is {codes.dtype} {codes.shape} and its scale {scale.dtype}; runtimes read a matrix of "
            f"{rule.codes} and {rule.scale}",
        )
        return
    out, in_ = codes.shape[0] * rule.packs[0], codes.shape[1] * rule.packs[1]
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "channel": (out,),
        "tile": (-(-out // TILE), 1, -(-in_ // TILE), 1),
        "block": (out, scale.shape[-1] if scale.shape else 0),
    }
    if scale.shape != shapes[rule.per] or (rule.per == "block" and in_ % (scale.shape[-1] or 1)):
        yield algo, f"weight_scale {scale.shape} does not fit a weight [{out}, {in_}] with one scale per {rule.per}"
    for part, needed in (("input_scale", rule.entry), ("weight_scale_2", rule.second)):
        part_spec = specs.get(f"{module}.{part}")
        if needed and part_spec is None:
            yield part, f"{part} is missing"
        elif part_spec is not None and not needed:
            yield algo, f"{part} is present, but nothing reads it"
        elif part_spec is not None and (part_spec.dtype, part_spec.shape) != ("float32", ()):
            yield algo, f"{part} is {part_spec.dtype} {part_spec.shape}; runtimes read one float32"


def _scalars(holder: Mapping[str, SafetensorsFile]) -> Iterator[str]:
    """Scalar scales are finite and positive."""
    for name, file in holder.items():
        if name.endswith(SCALARS) and file.specs[name].dtype == "float32" and not file.specs[name].shape:
            value = float(file.read(name))
            if not (math.isfinite(value) and value > 0):
                code = "input_scale" if name.endswith("input_scale") else "scale"
                yield f"error [{code}] {name}: is {value}, not finite and positive"
