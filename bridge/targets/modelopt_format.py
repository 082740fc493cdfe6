"""ModelOpt's names of formats and its lists of excluded modules.

`summarize` follows `_prefix_wildcard_summarize_exclude_modules` of nvidia-modelopt 0.47 (torch/export/quant_utils.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from bridge.core.mappings import mappings, read_table
from bridge.core.values import Format, Numeric
from bridge.planning.plan import Plan
from bridge.quant.describe import numeric_words
from bridge.targets.stacks import listed_as

# The version of the contract: runtimes read who wrote a checkpoint to know what its fields mean.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
AWQ = {"has_zero_point": False, "pre_quant_scale": True}  # INT4 without AWQ has these fields as well  # sic
# (weight numerics, input numeric) -> the runtime's name, and whether `group_size` is written.
ALGORITHMS: dict[tuple[str, str], tuple[str, bool]] = {
    ("fp8 tensor", "fp8 tensor"):              ("FP8", False),
    ("fp8 channel", "fp8 token dynamic"):      ("FP8_PER_CHANNEL_PER_TOKEN", False),
    ("fp8 block 128 128", "none"):             ("fp8_pb_wo", False),  # sic
    ("fp8 block 128 128", "fp8 block 128 dynamic"): ("fp8_pb_wo", False),  # sic: ModelOpt has no other name for it
    ("int8 channel", "int8 tensor"):           ("W8A8_SQ_PER_CHANNEL", False),
    ("int8 channel", "none"):                  ("W8A16", False),
    ("int4 block", "none"):                    ("W4A16_AWQ", True),
    ("int4 block, fp8 tensor", "fp8 tensor"):  ("W4A8_AWQ", True),
    ("fp4 block 16 e4m3", "none"):             ("W4A16_NVFP4", True),
    ("fp4 block 16 e4m3", "fp4 block 16 e4m3 dynamic"): ("NVFP4", True),
    ("fp4 block 32 e4m3", "fp8 tensor"):       ("W4A8_NVFP4_FP8", True),
    ("fp8 block 32 e8m0", "fp8 block 32 e8m0 dynamic"): ("MXFP8", True),
    ("fp4 block 32 e8m0", "none"):             ("W4A16_MXFP4", True),  # TensorRT-LLM's name; ModelOpt says mxfp4
}  # fmt: skip

ROUTERS = ("gate", "router", "shared_expert_gate")


@cache
def class_prefixes(key: str) -> tuple[str, ...]:
    """How the classes begin that a row of `mappings/exports.toml` is about."""
    return read_table(mappings() / "exports.toml").words(key)


def excluded(plan: Plan) -> list[str]:
    """The runtime's list of unquantized matrices, embeddings, routers and tied heads, shortened and sorted."""
    sites = [step.site for step in plan.steps if step.site and step.format is None]
    kept = {name for site in sites for name in (site.module, *listed_as(site))}
    tied = {alias.removesuffix(".weight") for alias in plan.tied if alias.endswith(".weight")}
    quantized = (step.site for step in plan.quantized if step.site)
    return summarize(kept | tied, [name for site in quantized for name in (site.module, *site.asked)])


def routers(names: Iterable[str]) -> set[str]:
    """Modules among tensor `names` that choose experts: `gate` and the like, with a weight, beside `experts`."""
    names = list(names)
    blocks = {name[: name.index(".experts.")] for name in names if ".experts." in name}
    modules = set()
    for name in names:
        module, _, leaf = name.rpartition(".")
        block, _, last = module.rpartition(".")
        if leaf == "weight" and last in ROUTERS and block in blocks:
            modules.add(module)
    return modules


def summarize(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Shorten `kept` to the shortest prefixes at a dot that touch no quantized module, sorted.

    >>> summarize(["lm_head", "model.layers.0.mlp.up"], ["model.layers.1.mlp.up"])
    ['lm_head', 'model.layers.0*']
    """
    quantized_names = sorted(quantized)
    shortened: set[str] = set()
    for name in kept:
        for patterns in _candidates(name):
            if any(_touches(pattern, quantized_names) for pattern in patterns):
                continue
            shortened.add(patterns[-1])  # of `prefix`, `prefix.*` only the second is kept
            break
    return sorted(shortened)


def _candidates(name: str) -> Iterator[tuple[str, ...]]:
    """Patterns for a module, the shortest first; a pair covers `prefix` but not modules whose names begin with it."""
    for at, letter in enumerate(name):
        if letter == ".":
            yield (f"{name[:at]}*",)
            yield name[:at], f"{name[:at]}.*"
    yield (name,)


def _touches(pattern: str, names: list[str]) -> bool:
    """True if `pattern` is one of the sorted `names`, or a prefix of one followed by `*`."""
    prefix = pattern.removesuffix("*")
    at = bisect_left(names, prefix)
    if at == len(names):
        return False
    return names[at].startswith(prefix) if pattern.endswith("*") else names[at] == prefix


def setting(format_: Format) -> dict[str, Any]:
    """Return the JSON entry of a module in this format; {} if no runtime has a name for the format."""
    algorithm = ALGORITHMS.get(format_words(format_))
    if not algorithm:
        return {}
    name, has_group_size = algorithm
    if format_.prescales and name == "NVFP4":
        name = "NVFP4_AWQ"
    entry: dict[str, Any] = {"quant_algo": name}
    if has_group_size:
        entry["group_size"] = format_.weight[0].block[-1]
    return entry | (AWQ if "AWQ" in name else {})


def has_second(format_: Format) -> bool:
    """True if the format has a second scale: that of all NVFP4 blocks, or of W4A8's FP8."""
    return len(format_.weight) == 2 or format_.weight[0].two_level


def format_words(format_: Format) -> tuple[str, str]:
    """Weight and input of a format in the words of `ALGORITHMS`."""
    return ", ".join(_words(numeric) for numeric in format_.weight), numeric_words(format_.input)


def _words(numeric: Numeric) -> str:
    # `group_size` gives the block of INT4, the other blocks are fixed
    return numeric_words(replace(numeric, block=()) if numeric.dtype == "int4" else numeric)
