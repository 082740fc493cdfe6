"""Features of a config: options, tensors and GEMMs.

The names are TransformerEngine's; `LogQuantizedTensorStats` is ours. A caller declares feature classes of its own;
their options are not checked, and no Python file is loaded here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.text import described, nearest
from bridge.quant.schemes.scheme import Scheme, is_measured
from bridge.workflows.inspect.routes import GEMMS, INPUTS, TAKES, TENSORS, Options, Schedule, Use
from bridge.workflows.inspect.statistics.quantization import FORMATS
from bridge.workflows.inspect.te.options import (
    NAMING,
    SCHEDULE_KEYS,
    check_names,
    leaves,
    merged,
    names_of,
    parse_schedule,
    structs,
)
from bridge.workflows.inspect.te.stat_names import (
    check_scheme,
    parse_generic_stats,
    parse_quant_stats,
    parse_tensor_stats,
)
from bridge.workflows.inspect.te.where import OwnFeature, Where

CALLS = (
    "modify_tensor_enabled", "fp8_gemm_enabled", "inspect_tensor_enabled", "inspect_tensor_postquantize_enabled",
    "modify_tensor", "inspect_tensor", "inspect_tensor_postquantize",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a feature takes.

    `keys`: "tensors", "gemms" or both, which its words must name; none for features of a whole layer. `options`:
    besides names and schedule. `changes`: whether it changes what a GEMM takes, which only one feature may do.
    """

    name: str
    keys: tuple[str, ...]
    options: tuple[str, ...] = ()
    tensors: tuple[str, ...] | None = TENSORS
    changes: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("LogTensorStats", ("tensors",), ("stats",)),
        Kind("LogFp8TensorStats", ("tensors",), ("stats",), INPUTS),
        Kind("LogNvfp4TensorStats", ("tensors",), ("stats",), INPUTS),
        Kind("LogQuantizedTensorStats", ("tensors",), ("stats", "scheme")),
        Kind("DumpTensors", ("tensors",), ("high_precision_tensor", "quantized_tensor", "scheme")),
        Kind("DisableQuantizationGEMM", ("gemms",)),
        Kind("DisableFP8GEMM", ("gemms",)),
        Kind("DisableQuantizationLayer", ()),
        Kind("DisableFP8Layer", ()),
        Kind("FakeQuant", ("gemms", "tensors"), ("quant_format", "scheme"), changes=True),
        Kind("PerTensorScaling", ("gemms", "tensors"), (), INPUTS, changes=True),
    )
}


MODERN = {"DisableFP8GEMM": "DisableQuantizationGEMM", "DisableFP8Layer": "DisableQuantizationLayer"}


# nvdlfw-inspect's own feature, which stands in the section itself and answers explicit calls only
GENERIC = Kind("LogTensorStats", ("tensors",), ("stats",), None)


@dataclass(frozen=True)
class Feature:
    """An enabled feature of a section. `own`: a class of the caller's."""

    name: str
    uses: tuple[Use, ...]
    changes: bool = False
    own: bool = False


def parse_feature(name: str, words: Any, where: Where) -> Feature | None:
    """Return a feature under `transformer_engine` or `bridge`; None if it is not enabled or has problems."""
    kind = where.known.own.get(name) or KINDS.get(name)
    if kind is None:
        where.add(f"the feature is unknown; {nearest(name, [*KINDS, *where.known.own])}")
        return None
    return _feature(kind, words, where)


def parse_generic(words: Any, where: Where) -> Feature | None:
    """Return nvdlfw-inspect's own LogTensorStats; None if it is not enabled or has problems."""
    return _feature(GENERIC, words, where)


def _feature(kind: Kind | OwnFeature, words: Any, where: Where) -> Feature | None:
    if not is_enabled(words, where):
        return None
    before = where.count
    uses = _own_uses(kind, words, where) if isinstance(kind, OwnFeature) else _uses(kind, words, where)
    if where.count > before:
        return None
    return Feature(MODERN.get(kind.name, kind.name), tuple(uses), kind.changes, isinstance(kind, OwnFeature))


def _uses(kind: Kind, words: Mapping[str, Any], where: Where) -> list[Use]:
    """The uses of a feature of this package."""
    before = where.count
    _check(kind, words, where)
    if where.count > before:  # of names: the options may have problems, too
        for given in leaves(words):
            _options(kind, given, where)
            parse_schedule(given, where, excluded=kind is GENERIC)
        return []
    uses = [_use(kind, words, tensor, gemm, where) for tensor, gemm in _places(kind, words)]
    both = "gemms" in kind.keys and "tensors" in kind.keys
    if both and not where.known.called and not any(use.tensor for use in uses):
        taken = ", ".join(f"{gemm} takes {', '.join(TAKES[gemm])}" for gemm in names_of(words, "gemms"))
        where.add(f"changes nothing: none of its GEMMs takes a tensor that it names; {taken}")
    return uses


def clashes(one: Feature, other: Feature) -> list[str]:
    """What both change at the same step: "weight of fprop"."""
    if not (one.changes and other.changes):
        return []
    return [
        f"{use.tensor} of {use.gemm}"
        for use in one.uses
        for second in other.uses
        if use.tensor and use.gemm
        if (use.tensor, use.gemm) == (second.tensor, second.gemm) and use.schedule.meets(second.schedule)
    ]


def is_enabled(words: Any, where: Where) -> bool:
    """Whether a section or feature is enabled; a problem if it does not say so."""
    if not isinstance(words, Mapping):
        where.add(f"expected `enabled` and options, got {described(words)}")
        return False
    if type(enabled := words.get("enabled")) is not bool:
        text = "`enabled` is missing" if "enabled" not in words else f"enabled = {described(enabled)}"
        where.add(f"{text}; write `enabled: True` or `enabled: False`")
    return enabled is not False  # with a problem it is read, to report the other mistakes with it


def _check(kind: Kind, words: Mapping[str, Any], where: Where) -> None:
    """Record unknown options and names, also inside structs."""
    options = (*kind.options, *SCHEDULE_KEYS)
    _check_keys(words, ("enabled", *_naming(kind.keys), *options), where)
    inside = _naming([key for key in kind.keys if key == "tensors"])
    for entry in structs(words, "gemms"):
        _check_keys(entry, ("gemm", *inside, *options), where.inside("gemms_struct"))
    for entry in (words, *structs(words, "gemms")):
        for deeper in structs(entry, "tensors"):
            _check_keys(deeper, ("tensor", *options), where.inside("tensors_struct"))
    check_names(words, where, tensors=kind.tensors, keys=kind.keys)


def _naming(keys: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMING if name.removesuffix("_struct") in keys)


def _check_keys(words: Mapping[str, Any], known: tuple[str, ...], where: Where) -> None:
    for key in words:
        if key not in known:
            where.add(f"option {described(key)} is unknown; {nearest(str(key), known)}")


def _places(kind: Kind, words: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The tensors and GEMMs that checked words name; a tensor that a GEMM does not take is passed over."""
    if not kind.keys:
        yield from (("", gemm) for gemm in GEMMS)
    elif kind.keys == ("tensors",):
        yield from ((tensor, "") for tensor in names_of(words, "tensors"))
    elif kind.keys == ("gemms",):
        yield from (("", gemm) for gemm in names_of(words, "gemms"))
    else:
        for gemm in dict.fromkeys(names_of(words, "gemms")):
            taken = [tensor for tensor in TAKES[gemm] if merged(words, tensor, gemm) is not None]
            yield from ((tensor, gemm) for tensor in taken)
            if not taken and kind.name == "FakeQuant":  # its GEMM takes unquantized inputs all the same
                yield "", gemm


def _use(kind: Kind, words: Mapping[str, Any], tensor: str, gemm: str, where: Where) -> Use:
    given = dict(words) if not kind.keys else merged(words, tensor, gemm) or {}
    options = _options(kind, given, where) if tensor or kind.keys == ("tensors",) else Options()
    return Use(tensor, gemm, options, parse_schedule(given, where, excluded=kind is GENERIC))


def _options(kind: Kind, given: Mapping[str, Any], where: Where) -> Options:
    stats, known = given.get("stats"), where.known
    match kind.name:
        case _ if kind is GENERIC:
            return Options(parse_generic_stats(stats, where))
        case "LogTensorStats":
            return Options(parse_tensor_stats(stats, where))
        case "LogFp8TensorStats":
            return Options(parse_quant_stats(stats, where))
        case "LogNvfp4TensorStats":
            return Options(parse_quant_stats(stats, where, "nvfp4"))
        case "LogQuantizedTensorStats":
            scheme = check_scheme(given["scheme"], where) if "scheme" in given else ""
            if "scheme" in given and not scheme:
                return Options()
            return Options(parse_quant_stats(stats, where, scheme))
        case "DumpTensors":
            return _dump(given, where)
        case "FakeQuant":
            return _fake_quant(given, where)
        case _:
            if not known.called and not _has_static_scales(known.session):
                where.add("replaces a static scale of the inputs, and the session has none; pass quant='fp8'")
            return Options()


def _dump(given: Mapping[str, Any], where: Where) -> Options:
    chosen = {key: given.get(key, False) for key in ("high_precision_tensor", "quantized_tensor")}
    for key, value in chosen.items():
        if type(value) is not bool:
            where.add(f"{key} = {described(value)}; expected True or False")
    if not any(chosen.values()):
        where.add("writes nothing; set high_precision_tensor, quantized_tensor or both to True")
    scheme = check_scheme(given["scheme"], where) if "scheme" in given else ""
    if chosen["quantized_tensor"] is True and "scheme" not in given and not (where.known.session or where.known.called):
        where.add("quantized_tensor: names no scheme, and the session has none; write scheme: fp8, or quant=")
    return Options(**chosen, scheme=scheme)


def _fake_quant(given: Mapping[str, Any], where: Where) -> Options:
    if ("quant_format" in given) == ("scheme" in given):
        text = "both are given" if "scheme" in given else "both are missing"
        where.add(f"quant_format or scheme: {text}; write one, as in quant_format: FP8E4M3")
        return Options()
    if "scheme" in given:
        return Options(scheme=check_scheme(given["scheme"], where))
    if given["quant_format"] not in tuple(FORMATS):  # a list or a mapping has no hash
        text = described(given["quant_format"])
        where.add(f"quant_format {text} is unknown; {nearest(str(given['quant_format']), tuple(FORMATS))}")
    return Options(quant_format=str(given["quant_format"]))


def _has_static_scales(scheme: Scheme | None) -> bool:
    return scheme is not None and any(form.input is not None and is_measured(form.input) for form in scheme.formats)


def _own_uses(own: OwnFeature, words: Mapping[str, Any], where: Where) -> list[Use]:
    """The uses of a caller's class, one for the whole layer if its words name no tensor and no GEMM.

    `inspect_*` goes by the tensor, `fp8_gemm_enabled` by the GEMM, `modify_*` by both. The class reads the schedule.
    """
    if not any(name in words for name in NAMING):
        given = {key: value for key, value in words.items() if key != "enabled"}
        return [Use("", "", Options.as_given(given), Schedule())]
    inspects = any(call.startswith("inspect_") for call in own.calls)
    keys = (*(("gemms",) if own.changes or "fp8_gemm_enabled" in own.calls else ()),
            *(("tensors",) if own.changes or inspects else ()))  # fmt: skip
    before = where.count
    check_names(words, where, tensors=TENSORS, keys=keys)
    if inspects and where.count == before and not names_of(words, "tensors"):
        where.add("tensors stand inside gemms_struct, but inspect_tensor goes by the tensor alone")
    if where.count > before:
        return []
    places = [*_places(Kind(own.name, keys), words)] if own.changes else []
    if "fp8_gemm_enabled" in own.calls:
        places += [("", gemm) for gemm in names_of(words, "gemms")]
    if inspects:
        places += [(tensor, "") for tensor in names_of(words, "tensors")]
    return [
        Use(tensor, gemm, Options.as_given(merged(words, tensor, gemm)), Schedule())
        for tensor, gemm in dict.fromkeys(places)
    ]
