"""Faults of quantized modules: lists of the others, parts, sizes for ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import SourceError
from bridge.core.text import listed, named
from bridge.planning.drafts import asked_as
from bridge.sources.quantized.compressed_tensors import Compressed
from bridge.sources.quantized.fields import MAX_PATTERN, compiled
from bridge.sources.quantized.parts import QuantizedWeight
from bridge.workflows.doctor.checkpoint import Checkpoint
from bridge.workflows.doctor.finding import Finding
from bridge.workflows.doctor.scales import declared, is_cache_scale

# method -> the keys of its list of unquantized modules, in config.json and hf_quant_config.json
LISTS = {
    "modelopt": ("ignore", "exclude_modules"),
    "compressed-tensors": ("ignore",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "awq": ("modules_to_not_convert",),
}
CODES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
KNOWN = (*LISTS, "gptq", "auto-round", "mxfp4", "bitsandbytes", "fbgemm_fp8")
PACKED = ("weight_packed", "qweight")
RANKS = (2, 4, 8)
_PLAIN = re.compile(r"[\w.\-/]*")  # entries without patterns
_WILD = re.compile(r"\*|\?|\[.*?\]")
INNER = ("o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "fc2", "c_proj")  # cut along `in`
_WHOLE = re.compile(
    r"\.(?:q_a_proj|kv_a_proj_with_mqa|(?:shared_expert_)?gate|router(?:\..+)?|indexer\..+)$"
)  # on every rank


def entries(checkpoint: Checkpoint) -> list[str]:
    """The list of unquantized modules; empty without one."""
    found = (checkpoint.section.get(key) for key in LISTS.get(checkpoint.method, ()))
    words = next((words for words in found if isinstance(words, list)), [])
    return [entry for entry in words if isinstance(entry, str)]


def names(method: str, entry: str) -> Callable[[str], bool]:
    """Whether some program takes an entry for a module.

    compressed-tensors: the whole name, or a regular expression from its beginning. ModelOpt: wildcards, and vLLM any
    part of a name. fp8: the whole name; transformers and SGLang how it begins, transformers how it ends, and a regular
    expression up to a dot. AutoAWQ: any part, and transformers as in fp8.
    """
    if method == "compressed-tensors":
        return _expression(entry[3:]) if entry.startswith("re:") else lambda module: module == entry
    if method == "modelopt":
        wild = re.compile(translate(entry)).match
        return lambda module: entry in module or wild(module) is not None
    plain = _PLAIN.fullmatch(entry) is not None
    expression = (lambda _: False) if plain else _expression(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    if method == "fp8":
        begin = f"{entry}."
        return lambda m: m == entry or m.startswith(begin) or m.endswith(entry) or expression(m)
    return lambda module: entry in module or expression(module)


def named_by(method: str, words: Iterable[str], modules: Iterable[str]) -> dict[str, list[str]]:
    """Entry -> the modules that some program takes it for.

    Most entries name nothing of many modules: what of them is no pattern is looked for in all names at once.
    """
    modules = list(modules)
    text = "\n".join(modules)

    def possible(entry: str) -> bool:
        pieces = _WILD.split(entry) if method == "modelopt" else [entry] if _PLAIN.fullmatch(entry) else []
        return all(piece in text for piece in pieces)

    return {e: [*filter(names(method, e), modules)] if possible(e) else [] for e in words}


def _expression(pattern: str) -> Callable[[str], bool]:
    """Whether a regular expression of a file matches the beginning of a name; never for one that is refused."""
    try:
        match = compiled(pattern, "ignore").match
    except SourceError:
        return lambda _: False  # reading the checkpoint reports it
    return lambda name: len(name) <= MAX_PATTERN and match(name) is not None


def unnamed(checkpoint: Checkpoint, words: Iterable[str]) -> list[str]:
    """Unquantized modules that no entry of a list names in every program."""
    method, plain = checkpoint.method, unquantized(checkpoint)
    named_ = {*words} if method == "fp8" else {m for hit in named_by(method, words, plain).values() for m in hit}
    return [module for module in plain if module not in named_]


def unquantized(checkpoint: Checkpoint) -> list[str]:
    """Modules with a matrix of floats that is quantized elsewhere: in another layer, or under the same last name."""
    last = {module.rpartition(".")[2] for module in checkpoint.modules}
    plain = [
        name.removesuffix(".weight")
        for name, spec in checkpoint.specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2 and spec.dtype in FLOATS
    ]
    alike = [m for m in plain if m.rpartition(".")[2] in last and m not in checkpoint.modules]
    if checkpoint.method == "modelopt":
        return [] if "quantized_layers" in checkpoint.section else alike
    if checkpoint.method == "compressed-tensors":
        groups = Compressed(checkpoint.section, {})
        return [m for m in alike if groups.group(m) is not None]
    return alike if checkpoint.method == "fp8" else []  # servers look which modules of AutoAWQ's and GPTQ's have codes


def ignore_lists(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Entries that name quantized modules or nothing, and unquantized modules that no entry names."""
    method, listed_ = checkpoint.method, entries(checkpoint)
    if method not in LISTS or not checkpoint.modules:
        return
    hits = named_by(method, listed_, checkpoint.modules)
    left = unnamed(checkpoint, listed_)
    added = [m for m in mended(checkpoint) if m not in hits]
    repairs = not any(named_by(method, added, checkpoint.modules).values())
    if wrong := [entry for entry, hit in hits.items() if hit]:
        where = tuple(dict.fromkeys(module for entry in wrong for module in hits[entry]))
        what = f"quantized, and the list of unquantized modules names it: {named(wrong)}"
        yield Finding("ignored-codes", what, where, repairs=repairs)
    if left:
        what = "not quantized, and no entry of the list of unquantized modules names it in every server"
        yield Finding("not-ignored", what, tuple(left), repairs=repairs)
    rest = [e for e in hits if not hits[e] and not (e.isidentifier() and (e.endswith("head") or e[:1].isupper()))]
    for known in (_others, _asked):
        rest = [entry for entry, hit in named_by(method, rest, known(checkpoint) if rest else ()).items() if not hit]
    if rest:
        what = "an entry of the list of unquantized modules that names no module here"
        yield Finding("ignores-nothing", what, tuple(rest), "none needed")


def _others(checkpoint: Checkpoint) -> set[str]:
    """Tensors and modules of what is not quantized."""
    plain = [name for name in checkpoint.specs if name.rpartition(".")[0] not in checkpoint.modules]
    return {*plain, *(name.rpartition(".")[0] for name in plain)}


def _asked(checkpoint: Checkpoint) -> set[str]:
    """The names under which servers ask for modules that they hold as one."""
    modules = {name.rpartition(".")[0] for name in checkpoint.specs}
    return {name for module in modules for name in asked_as(module, 0, 0)}


def mended(checkpoint: Checkpoint) -> list[str]:
    """The list without entries that name a quantized module, and every unquantized module that the others do not."""
    hits = named_by(checkpoint.method, entries(checkpoint), checkpoint.modules)
    right = [entry for entry, hit in hits.items() if not hit]
    return right + unnamed(checkpoint, right)


def has_codes(checkpoint: Checkpoint) -> bool:
    """Whether a tensor may hold codes, by its dtype or name."""
    return any(spec.dtype in CODES or name.endswith(PACKED) for name, spec in checkpoint.specs.items())


def leftover(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A config that says that weights are quantized, of which none is, and neither are keys and values."""
    cache = (
        checkpoint.section.get("kv_cache_scheme") or declared(checkpoint) or any(map(is_cache_scale, checkpoint.specs))
    )
    if checkpoint.method in KNOWN and not checkpoint.modules and not has_codes(checkpoint) and not cache:
        what = f"the config says that weights are quantized ({checkpoint.method}), and no tensor holds codes"
        yield Finding("leftover", what, repairs=True)


def parts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors of quantized modules that are missing or misshapen, and layouts that are not read here."""
    unread, method = checkpoint.tensors.unread, checkpoint.method
    if (
        not checkpoint.tensors.used
        and not checkpoint.tensors.problems
        and (has_codes(checkpoint) if method in KNOWN else method)
    ):
        unread = (f"tensors of quant_method {method!r}",)
    if problems := [problem for problem in checkpoint.tensors.problems if problem not in unread]:
        what = str(listed("", problems)).removeprefix(": ")
        yield Finding("tensors", what, (), "get the checkpoint again, or quantize the model again")
    if unread:
        what = f"{str(listed('', unread)).removeprefix(': ')}: neither checked nor converted here; servers may load it"
        yield Finding("unread", what, (), "none needed where a server loads it")


def ranks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Matrices that ranks of tensor parallelism cannot share in whole blocks; some are whole on every rank."""
    by_count: dict[int, list[str]] = {}
    shared = [w for w in checkpoint.modules.values() if not _WHOLE.search(w.module)]
    for weight in shared:
        heads = _kv_heads(checkpoint.config) if weight.module.endswith(("k_proj", "v_proj")) else 0
        if count := next((count for count in RANKS if not _divides(weight, min(count, heads or count))), 0):
            by_count.setdefault(count, []).append(weight.module)
    for count, modules in by_count.items():
        what = f"{count} ranks (tensor parallelism) cannot share it in whole blocks of codes and scales"
        yield Finding(
            "ranks", what, tuple(modules), f"serve it on fewer than {count} ranks, or quantize in other blocks"
        )


def _kv_heads(config: Mapping[str, Any]) -> int:
    """The heads of keys and values, which servers repeat where there are more ranks; 0 if the config does not say."""
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    known = (part.get(key) for part in texts for key in ("num_key_value_heads", "num_attention_heads"))
    return next((count for count in known if isinstance(count, int)), 0)


def _divides(weight: QuantizedWeight, count: int) -> bool:
    *_, out, in_ = weight.spec.shape
    numeric = weight.format.weight[0]
    tile: Sequence[int] = numeric.block if len(numeric.block) == 2 else (1, *(numeric.block or (1,)))
    if weight.module.rpartition(".")[2] in INNER:
        return in_ % (count * tile[1]) == 0
    return out % (count * tile[0]) == 0
