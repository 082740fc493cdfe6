"""Faults of quantized modules: lists of the others, parts, sizes for ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from bridge.core.dtypes import FLOATS
from bridge.core.errors import SourceError
from bridge.core.text import listed, named
from bridge.sources.quantized.compressed_tensors import Compressed
from bridge.sources.quantized.fields import matches
from bridge.sources.quantized.parts import QuantizedWeight
from bridge.workflows.doctor.checkpoint import Checkpoint
from bridge.workflows.doctor.finding import Finding

# method -> the keys of its list of unquantized modules, in config.json and hf_quant_config.json
LISTS = {
    "modelopt": ("ignore", "exclude_modules"),
    "compressed-tensors": ("ignore",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "awq": ("modules_to_not_convert",),
}
CODES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
PACKED = ("weight_packed", "qweight")
RANKS = (2, 4, 8)
INNER = ("o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "fc2", "c_proj")  # cut along `in`


def entries(checkpoint: Checkpoint) -> list[str]:
    """The list of unquantized modules; empty without one."""
    found = (checkpoint.section.get(key) for key in LISTS.get(checkpoint.method, ()))
    words = next((words for words in found if isinstance(words, list)), [])
    return [entry for entry in words if isinstance(entry, str)]


def names(method: str, entry: str, module: str) -> bool:
    """Whether some server takes an entry for this module.

    compressed-tensors: the whole name, or a regular expression from its beginning. ModelOpt: wildcards, and vLLM any
    part of a name. fp8: the whole name, and transformers and SGLang a name that it begins. AutoAWQ: any part.
    """
    if method == "compressed-tensors":
        try:
            return matches(entry[3:], module, "ignore") if entry.startswith("re:") else entry == module
        except SourceError:
            return False  # reading the checkpoint reports it
    if method == "modelopt":
        return entry in module or fnmatchcase(module, entry)
    if method == "fp8":
        return entry == module or module.startswith(f"{entry}.")
    return entry in module


def always(method: str, entry: str, module: str) -> bool:
    """Whether every server takes an entry for this module."""
    return entry == module if method == "fp8" else names(method, entry, module)


def unquantized(checkpoint: Checkpoint) -> list[str]:
    """Modules with a matrix of floats that is quantized elsewhere: in another layer, or under the same last name."""
    last = {module.rpartition(".")[2] for module in checkpoint.modules}
    plain = [
        name.removesuffix(".weight")
        for name, spec in checkpoint.specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2 and spec.dtype in FLOATS
    ]
    return [
        m for m in plain if m.rpartition(".")[2] in last and m not in checkpoint.modules and not _kept(checkpoint, m)
    ]


def _kept(checkpoint: Checkpoint, module: str) -> bool:
    """Whether the config leaves a module unquantized by another rule than its list."""
    if checkpoint.method == "modelopt":
        return "quantized_layers" in checkpoint.section
    if checkpoint.method == "compressed-tensors":
        return Compressed(checkpoint.section, {}).group(module) is None
    return checkpoint.method != "fp8"  # servers look which modules of AutoAWQ's and GPTQ's have codes


def ignore_lists(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Entries that name quantized modules or nothing, and unquantized modules that no entry names."""
    method, listed_ = checkpoint.method, entries(checkpoint)
    if method not in LISTS or not checkpoint.modules:
        return
    wrong = {e: hit for e in listed_ if (hit := [m for m in checkpoint.modules if names(method, e, m)])}
    repairs = not any(names(method, e, m) for e in mended(checkpoint) for m in checkpoint.modules)
    if wrong:
        where = tuple(dict.fromkeys(module for hit in wrong.values() for module in hit))
        what = f"quantized, and the list of unquantized modules names it: {named(wrong)}"
        yield Finding("ignored-codes", what, where, repairs=repairs)
    left = [m for m in unquantized(checkpoint) if not any(always(method, e, m) for e in listed_)]
    if left:
        what = "not quantized, and no entry of the list of unquantized modules names it in every server"
        yield Finding("not-ignored", what, tuple(left), repairs=repairs)
    if empty := [entry for entry in listed_ if entry not in wrong and not _names_any(checkpoint, entry)]:
        what = "an entry of the list of unquantized modules that names no module here"
        yield Finding("ignores-nothing", what, tuple(empty), repairs=repairs)


def _names_any(checkpoint: Checkpoint, entry: str) -> bool:
    """Whether an entry names a module here, a head that is tied, or a class."""
    if entry.isidentifier() and (entry.endswith("head") or entry[:1].isupper()):
        return True
    modules = {name.rpartition(".")[0] for name in checkpoint.specs}
    return any(names(checkpoint.method, entry, module) for module in modules)


def mended(checkpoint: Checkpoint) -> list[str]:
    """The list with entries that name no quantized module, and every unquantized module that those do not name."""
    method, modules = checkpoint.method, checkpoint.modules
    alone = [e for e in entries(checkpoint) if not any(names(method, e, m) for m in modules)]
    right = [e for e in alone if _names_any(checkpoint, e)]
    return right + [m for m in unquantized(checkpoint) if not any(always(method, e, m) for e in right)]


def leftover(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A config that says that weights are quantized, of which none is."""
    known = (*LISTS, "gptq", "auto-round", "mxfp4")
    codes = [name for name, spec in checkpoint.specs.items() if spec.dtype in CODES or name.endswith(PACKED)]
    if checkpoint.method in known and not checkpoint.modules and not codes:
        what = f"the config says that weights are quantized ({checkpoint.method}), and no tensor holds codes"
        yield Finding("leftover", what, repairs=True)


def parts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors of quantized modules that are missing, misshapen, or not read."""
    if problems := checkpoint.tensors.problems:
        what = str(listed("", problems)).removeprefix(": ")
        yield Finding("tensors", what, (), "get the checkpoint again, or quantize the model again")


def ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Matrices that ranks of tensor parallelism cannot share in whole blocks."""
    by_count: dict[int, list[str]] = {}
    for weight in checkpoint.modules.values():
        if count := next((count for count in RANKS if not _divides(weight, count)), 0):
            by_count.setdefault(count, []).append(weight.module)
    for count, modules in by_count.items():
        what = f"{count} ranks (tensor parallelism) cannot share it in whole blocks of codes and scales"
        yield Finding(
            "ranks", what, tuple(modules), f"serve it on fewer than {count} ranks, or quantize in other blocks"
        )


def _divides(weight: QuantizedWeight, count: int) -> bool:
    *_, out, in_ = weight.spec.shape
    numeric = weight.format.weight[0]
    tile: Sequence[int] = numeric.block if len(numeric.block) == 2 else (1, *(numeric.block or (1,)))
    if weight.module.rpartition(".")[2] in INNER:
        return in_ % (count * tile[1]) == 0
    return out % (count * tile[0]) == 0
