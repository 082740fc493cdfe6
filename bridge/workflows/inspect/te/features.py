"""Features of a config: options, tensors and GEMMs.

The names are TransformerEngine's; `LogQuantizedTensorStats` is ours. A caller declares feature classes of its own;
their options are not checked, and no Python file is loaded here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.core.parsing.problems import Problems
from bridge.core.text import described, nearest
from bridge.quant.schemes.scheme import Scheme, is_measured
from bridge.workflows.inspect.routes import GEMMS, INPUTS, TAKES, TENSORS, Options, Schedule
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
class OwnFeature:
    """A feature class of the caller's: its name, and which of `CALLS` it has."""

    name: str
    calls: frozenset[str]

    @property
    def changes(self) -> bool:
        return any(call.startswith("modify_tensor") for call in self.calls)


@dataclass(frozen=True)
class Use:
    """A feature for one tensor, GEMM or both; "" for every one of them."""

    tensor: str
    gemm: str
    options: Options
    schedule: Schedule


@dataclass(frozen=True)
class Feature:
    """An enabled feature of a section. `own`: a class of the caller's."""

    name: str
    uses: tuple[Use, ...]
    changes: bool = False
    own: bool = False


@dataclass(frozen=True)
class Known:
    """What a config may name besides the features of this package, and the scheme that the session quantizes with.

    `called`: a module that quantizes by itself calls the features, so what names no scheme means that module's.
    """

    session: Scheme | None = None
    own: Mapping[str, OwnFeature] = field(default_factory=dict)
    called: bool = False


def parse_feature(name: str, words: Any, where: str, problems: Problems, known: Known) -> Feature | None:
    """Return a feature under `transformer_engine` or `bridge`; None if it is not enabled or has problems."""
    own = known.own.get(name)
    if own is None and name not in KINDS:
        problems.add(f"{where}: the feature is unknown; {nearest(name, [*KINDS, *known.own])}")
        return None
    if not is_enabled(words, where, problems):
        return None
    before = problems.places
    if own:
        uses = _own_uses(own, words, where, problems)
        changes = own.changes
    else:
        kind = KINDS[name]
        _check(kind, words, where, problems)
        if problems.places > before:  # of names: the options may have problems, too
            for given in leaves(words):
                _options(kind, given, where, problems, known)
                parse_schedule(given, where, problems)
            return None
        uses = [_use(kind, words, tensor, gemm, where, problems, known) for tensor, gemm in _places(kind, words)]
        changes = kind.changes
        if "gemms" in kind.keys and "tensors" in kind.keys and not known.called and not any(use.tensor for use in uses):
            gemms = names_of(words, "gemms")
            taken = ", ".join(f"{gemm} takes {', '.join(TAKES[gemm])}" for gemm in gemms)
            problems.add(f"{where}: changes nothing: none of its GEMMs takes a tensor that it names; {taken}")
    if problems.places > before:
        return None
    return Feature(MODERN.get(name, name), tuple(uses), changes, own is not None)


def parse_generic(words: Any, where: str, problems: Problems) -> Feature | None:
    """Return nvdlfw-inspect's own LogTensorStats; None if it is not enabled or has problems."""
    if not is_enabled(words, where, problems):
        return None
    before = problems.places
    _check(GENERIC, words, where, problems)
    if problems.places > before:
        given = [("", options) for options in leaves(words)]
    else:
        given = [(tensor, merged(words, tensor) or {}) for tensor in names_of(words, "tensors")]
    uses = [_generic_use(tensor, options, where, problems) for tensor, options in given]
    return None if problems.places > before else Feature(GENERIC.name, tuple(uses))


def _generic_use(tensor: str, given: Mapping[str, Any], where: str, problems: Problems) -> Use:
    stats = parse_generic_stats(given.get("stats"), where, problems)
    return Use(tensor, "", Options(stats), parse_schedule(given, where, problems, excluded=True))


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


def is_enabled(words: Any, where: str, problems: Problems) -> bool:
    """Whether a section or feature is enabled; a problem if it does not say so."""
    if not isinstance(words, Mapping):
        problems.add(f"{where}: expected `enabled` and options, got {described(words)}")
        return False
    if type(enabled := words.get("enabled")) is not bool:
        text = "`enabled` is missing" if "enabled" not in words else f"enabled = {described(enabled)}"
        problems.add(f"{where}: {text}; write `enabled: True` or `enabled: False`")
    return enabled is not False  # with a problem it is read, to report the other mistakes with it


def _check(kind: Kind, words: Mapping[str, Any], where: str, problems: Problems) -> None:
    """Record unknown options and names, also inside structs."""
    options = (*kind.options, *SCHEDULE_KEYS)
    _check_keys(words, ("enabled", *_naming(kind.keys), *options), where, problems)
    inside = _naming([key for key in kind.keys if key == "tensors"])
    for entry in structs(words, "gemms"):
        _check_keys(entry, ("gemm", *inside, *options), f"{where}: gemms_struct", problems)
    for entry in (words, *structs(words, "gemms")):
        for deeper in structs(entry, "tensors"):
            _check_keys(deeper, ("tensor", *options), f"{where}: tensors_struct", problems)
    check_names(words, where, problems, tensors=kind.tensors, keys=kind.keys)


def _naming(keys: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMING if name.removesuffix("_struct") in keys)


def _check_keys(words: Mapping[str, Any], known: tuple[str, ...], where: str, problems: Problems) -> None:
    for key in words:
        if key not in known:
            problems.add(f"{where}: option {described(key)} is unknown; {nearest(str(key), known)}")


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


def _use(
    kind: Kind, words: Mapping[str, Any], tensor: str, gemm: str, where: str, problems: Problems, known: Known
) -> Use:
    given = dict(words) if not kind.keys else merged(words, tensor, gemm) or {}
    options = _options(kind, given, where, problems, known) if tensor or kind.keys == ("tensors",) else Options()
    return Use(tensor, gemm, options, parse_schedule(given, where, problems))


def _options(kind: Kind, given: Mapping[str, Any], where: str, problems: Problems, known: Known) -> Options:
    stats = given.get("stats")
    match kind.name:
        case "LogTensorStats":
            return Options(parse_tensor_stats(stats, where, problems))
        case "LogFp8TensorStats":
            return Options(parse_quant_stats(stats, where, problems, "", known.session, known.called))
        case "LogNvfp4TensorStats":
            return Options(parse_quant_stats(stats, where, problems, "nvfp4", known.session, known.called))
        case "LogQuantizedTensorStats":
            scheme = check_scheme(given["scheme"], where, problems) if "scheme" in given else ""
            if "scheme" in given and not scheme:
                return Options()
            return Options(parse_quant_stats(stats, where, problems, scheme, known.session, known.called))
        case "DumpTensors":
            return _dump(given, where, problems, known)
        case "FakeQuant":
            return _fake_quant(given, where, problems)
        case _:
            if not known.called and not _has_static_scales(known.session):
                problems.add(
                    f"{where}: replaces a static scale of the inputs, and the session has none; pass quant='fp8'"
                )
            return Options()


def _dump(given: Mapping[str, Any], where: str, problems: Problems, known: Known) -> Options:
    chosen = {key: given.get(key, False) for key in ("high_precision_tensor", "quantized_tensor")}
    for key, value in chosen.items():
        if type(value) is not bool:
            problems.add(f"{where}: {key} = {described(value)}; expected True or False")
    if not any(chosen.values()):
        problems.add(f"{where}: writes nothing; set high_precision_tensor, quantized_tensor or both to True")
    scheme = check_scheme(given["scheme"], where, problems) if "scheme" in given else ""
    if chosen["quantized_tensor"] is True and "scheme" not in given and not (known.session or known.called):
        problems.add(
            f"{where}: quantized_tensor: names no scheme, and the session has none; write scheme: fp8, or quant="
        )
    return Options(**chosen, scheme=scheme)


def _fake_quant(given: Mapping[str, Any], where: str, problems: Problems) -> Options:
    if ("quant_format" in given) == ("scheme" in given):
        text = "both are given" if "scheme" in given else "both are missing"
        problems.add(f"{where}: quant_format or scheme: {text}; write one, as in quant_format: FP8E4M3")
        return Options()
    if "scheme" in given:
        return Options(scheme=check_scheme(given["scheme"], where, problems))
    if given["quant_format"] not in tuple(FORMATS):  # a list or a mapping has no hash
        text = described(given["quant_format"])
        problems.add(f"{where}: quant_format {text} is unknown; {nearest(str(given['quant_format']), tuple(FORMATS))}")
    return Options(quant_format=str(given["quant_format"]))


def _has_static_scales(scheme: Scheme | None) -> bool:
    return scheme is not None and any(form.input is not None and is_measured(form.input) for form in scheme.formats)


def _own_uses(own: OwnFeature, words: Mapping[str, Any], where: str, problems: Problems) -> list[Use]:
    """The uses of a caller's class, one for the whole layer if its words name no tensor and no GEMM.

    `inspect_*` goes by the tensor, `fp8_gemm_enabled` by the GEMM, `modify_*` by both. The class reads the schedule.
    """
    if not any(name in words for name in NAMING):
        given = {key: value for key, value in words.items() if key != "enabled"}
        return [Use("", "", Options.as_given(given), Schedule())]
    inspects = any(call.startswith("inspect_") for call in own.calls)
    keys = (*(("gemms",) if own.changes or "fp8_gemm_enabled" in own.calls else ()),
            *(("tensors",) if own.changes or inspects else ()))  # fmt: skip
    before = problems.places
    check_names(words, where, problems, tensors=TENSORS, keys=keys)
    if inspects and problems.places == before and not names_of(words, "tensors"):
        problems.add(f"{where}: tensors stand inside gemms_struct, but inspect_tensor goes by the tensor alone")
    if problems.places > before:
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
