"""What entries of a config.json change, and which a target cannot express.

A field is followed by rows (a formula of the table has it), computes something (`[computes]`, and other fields of
`[config]`), has no effect (`mappings/config.toml`), or is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from bridge.core.mappings import TableFile, mappings, read_table
from bridge.core.text import described, near, nearest

if TYPE_CHECKING:
    from bridge.tables.architectures.arch import ArchTable

SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers
PARTIAL = "partial_rotary_factor"
ACTIVATION, EPSILON = "the activation of the MLP", "what norms add to the variance"  # [meaning] of mappings/config.toml
_FIELD = re.compile(
    r"(?m)^ +(?:self\.)?[\"']?([a-z]\w*)[\"']?(?: ?=|: )"
)  # of a class, of its arguments or its aliases


_BASE = re.compile(r"(?m)^    (?:def )?([a-z]\w*)(?:: |\(self\))")  # fields and properties of all configs


@cache
def shared() -> TableFile:
    """`mappings/config.toml`."""
    return read_table(mappings() / "config.toml")


@cache
def listed(section: str) -> frozenset[str]:
    """The fields of a section of `mappings/config.toml`: `without_effect` on weights and graph, read `elsewhere`."""
    return frozenset(name for names in shared().section(section).values() for name in names)


def without_origin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the fields that say who saved it: fine-tunes differ in those alone.

    transformers looks whether the version that wrote it is there, not at its value.
    """
    saved = shared().section("without_effect")["saved"]
    return {
        name: bool(value) if name == "transformers_version" else value
        for name, value in config.items()
        if name not in saved
    }


# Names of one function in transformers' ACT2FN; those of gelu with tanh differ by 1e-12 at most.
SPELLED = {
    "swish": "silu", "gelu_python": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new",
    "gelu_python_tanh": "gelu_new",
}  # fmt: skip
INSTEAD = "change it in config.json if that is meant, else take target hf or trt"
MISSPELLED = 0.8  # how alike a field's name and one that is no field are, of 1, so that it is named


def as_read(config: Mapping[str, Any], table: ArchTable) -> dict[str, Any]:
    """The config as its class reads it: one rotary entry, and no part of a head that the class does not read.

    Of `rope_scaling` and `rope_parameters` the first counts (`convert_rope_params_to_dict` of transformers 5.23).
    """
    read = dict(config)
    if any(malformed_rope(config)):
        return read
    read |= {name: _scaled(entry) for name in ("rope_scaling", "rope_parameters") if (entry := read.get(name))}
    scaling, given = read.get("rope_scaling"), read.get("rope_parameters")
    if scaling and given:
        del read["rope_scaling"]
        kinds = isinstance(given.get(FULL), Mapping)
        read["rope_parameters"] = {**given, FULL: {**given[FULL], **scaling}} if kinds else dict(scaling)
    if scaling and not given and "_sliding_window_pattern" in table.computes:  # Gemma 3 has a rope_type before it reads
        read["rope_scaling"] = {"rope_type": "default", **scaling}
    if table.file.section("computes"):  # what other classes read and this one does not
        own = {*table.computes, *table.config}
        read = {name: value for name, value in read.items() if name in own or name not in shared().section("meaning")}
    for name, words in table.file.section("reads").items():
        read |= {name: words[read[name]]} if read.get(name) in words else {}
    if "use_sliding_window" in table.computes and not read.get("use_sliding_window"):
        read = {name: value for name, value in read.items() if name not in ("sliding_window", "max_window_layers")}
    if read.get("layer_types"):  # from which layer on windows are, where the kinds of layers are not given
        read.pop("max_window_layers", None)
    read |= {name: SPELLED[str(value)] for name, value in read.items() if "act" in name and str(value) in SPELLED}
    if table.file.section("computes") and PARTIAL not in table.computes:
        read.pop(PARTIAL, None)
        for name in ("rope_scaling", "rope_parameters"):
            if entry := read.get(name):
                read[name] = _whole(entry) | {kind: _whole(entry[kind]) for kind in (FULL, SLIDING) if entry.get(kind)}
    return read


def _whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A rotary entry without the part of a head that turns, which only code of scaled ones reads."""
    scaled = entry.get("rope_type", entry.get("type", "default")) != "default"
    return {key: value for key, value in entry.items() if scaled or key != PARTIAL}


def _scaled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A rotary entry in which a linear scaling by 1, of the model or of a kind of layers, is none."""
    entry = {key: _scaled(value) if isinstance(value, Mapping) else value for key, value in entry.items()}
    if entry.get("rope_type", entry.get("type")) != "linear" or entry.get("factor") != 1:
        return dict(entry)
    return {"rope_type": "default"} | {
        key: value for key, value in entry.items() if key not in ("rope_type", "type", "factor")
    }


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a token sees only those before it, in a decoder (`create_causal_mask` of transformers 5.23, Gemma's)."""
    return bool(config.get("is_causal", True)) and not config.get("use_bidirectional_attention")


def window_of(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """Tokens that attention looks back; None if they are all of the context, in which no token is further away."""
    window, context = config.get("sliding_window", default), config.get("max_position_embeddings")
    return None if not window or (isinstance(context, int) and window >= context) else int(window)


def malformed_rope(config: Mapping[str, Any]) -> Iterator[str]:
    """Rotary entries that are no objects, of the model or of a kind of layers, each with what it should be."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        kinds = {kind: entry.get(kind) for kind in (FULL, SLIDING)} if isinstance(entry, Mapping) else {}
        for part, value in ((name, entry), *kinds.items()):
            if not isinstance(value, Mapping | None):
                yield f"{part} is {described(value)}; it should be an object with rope_type and so on"


def impossible(table: ArchTable, config: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """What no class of transformers takes: values of another type than the field's, and words that it does not know."""
    for name, default in {**table.config, **table.computes}.items():
        value = config.get(name)
        if value is None or default in (None, "none") or isinstance(default, list):
            continue
        if isinstance(value, list) and _takes_list(name, architecture):
            continue
        kind = "true or false" if isinstance(default, bool) else "a word" if isinstance(default, str) else "a number"
        known = {"true or false": int, "a word": str, "a number": int | float}[kind]
        if not isinstance(value, known) or (kind == "a number" and isinstance(value, bool)):
            yield f"{name} is {described(value)}; it should be {kind}, as {_shown(default)} is"
        elif _is_number(value) and shared().section("meaning").get(name) == EPSILON and value < 0:
            yield f"{name} is {value}; it should be 0 or above"
    words = shared().section("words")
    given = {name: config.get(name) for name, what in shared().section("meaning").items() if what == ACTIVATION}
    for name, value in given.items():
        if isinstance(value, str) and value not in words["activations"]:
            yield f"{name} is {value!r}; {nearest(value, words['activations'])}"
    if any(malformed_rope(config)):
        return
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name) or {}
        for part in (entry, *(value for value in entry.values() if isinstance(value, Mapping))):
            kind = part.get("rope_type", part.get("type", "default"))
            if kind not in words["rope_types"]:
                yield f"{name} has the rope_type {described(kind)}; {nearest(str(kind), words['rope_types'])}"
            for key in words["rope_numbers"]:
                if (number := part.get(key)) is not None and not _is_number(number):
                    yield f"{name} has the {key} {described(number)}; it should be a number"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _takes_list(name: str, architecture: str) -> bool:
    """Whether a field may be a list, by its annotation; True without transformers' code of the architecture."""
    code = [text for file, text in _code(architecture) if file.startswith("configuration_")]
    field = re.compile(rf"(?m)^ +{re.escape(name)}: [^=\n]*\b(?:list|tuple|Sequence)\b")
    return not code or any(map(field.search, code))


def not_read(given: Mapping[str, Any], stated: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Entries that a caller gives and that no code reads: misspelled ones. A config.json, `stated`, may have any.

    Without transformers' code of the architecture nothing tells them.
    """
    code = _code(architecture)
    fields = {name for file, text in code for name in _FIELD.findall(text) if file.startswith("configuration_")}
    known = {*stated, *fields, *_elsewhere(), *shared().section("meaning"), *(_BASE.findall(_base()) if code else ())}
    for name in given:
        if code and name not in known and not _reader(name, architecture):
            close = near(name, {*stated, *fields}, MISSPELLED)
            hint = f"; nearest: {close}" if close else ""
            yield f"{name} is no field of {architecture}'s config, and no code reads it{hint}"


@cache
def _base() -> str:
    """The text of the file with the class of all configs of transformers."""
    spec = find_spec("transformers")
    return Path(spec.origin).with_name("configuration_utils.py").read_text("utf-8") if spec and spec.origin else ""


def not_followed(
    table: ArchTable, architecture: str, config: Mapping[str, Any], follows: Collection[str]
) -> Iterator[str]:
    """What an output that expresses `follows` would compute differently from the model: other entries than defaults.

    config: as `as_read` returns it.
    """
    known = {*follows, *_elsewhere(), *(table.config.keys() - table.computes.keys())}
    for name, value in config.items():
        if name in known:
            continue
        if name in table.computes:
            default = table.computes[name]
            if not _same(value, default):
                meaning = shared().section("meaning").get(name, "it changes what the model computes")
                yield (
                    f"{name} is {_shown(value)} ({meaning}); the output cannot say so and means "
                    f"{_shown(default)}; {INSTEAD}"
                )
        elif reader := _reader(name, architecture):
            yield (
                f"{name} is {_shown(value)}, which {reader} reads; [computes] of {table.file.name} does not list it; "
                "take target hf or trt, which need no list, or, if it changes nothing, remove it from config.json"
            )


def not_known(table: ArchTable, architecture: str, config: Mapping[str, Any]) -> str:
    """A note of entries that no table knows, where transformers' code is not there to ask; "" if there are none."""
    known = {*table.computes, *table.config, *_elsewhere()}
    names = [name for name in config if name not in known]
    if not names or _code(architecture):
        return ""
    what = f"{architecture}'s code is not installed (transformers), so nothing says whether it reads"
    return f"{what} {', '.join(names)} of config.json; taken to change nothing"


def _elsewhere() -> frozenset[str]:
    return listed("without_effect") | listed("elsewhere")


def _same(value: object, default: object) -> bool:
    """Numbers of any type are equal; what is off is like none, and so is a list of layers without a window."""
    if default is None and isinstance(value, list):
        return set(map(str, value)) <= {FULL}
    if default is None:
        return value is None or value is False
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else described(value)


@cache
def _reader(name: str, architecture: str) -> str:
    """The file of transformers that reads a field for an architecture; "" if none does, as far as its text shows."""
    word = re.escape(name)
    for file, text in _code(architecture):
        if re.search(rf"""config\.{word}\b|config, ["']{word}["']|kwargs\.(get|pop)\(["']{word}["']""", text):
            return f"transformers' {file}"
    return ""


@cache
def _code(architecture: str) -> tuple[tuple[str, str], ...]:
    """The names and texts of the files with an architecture's class and its config's; none without transformers."""
    spec = find_spec("transformers")
    for folder in Path(spec.origin).parent.joinpath("models").iterdir() if spec and spec.origin else ():
        modelling = folder / f"modeling_{folder.name}.py"
        if modelling.is_file() and f"class {architecture}(" in (text := modelling.read_text("utf-8")):
            config = folder / f"configuration_{folder.name}.py"
            return (modelling.name, _used(text, architecture)), (config.name, config.read_text("utf-8"))
    return ()


def _used(text: str, architecture: str) -> str:
    """What a class of a file uses of it, at any distance: towers of images are in the files of text models."""
    import ast

    lines, parts = text.splitlines(keepends=True), dict[str, ast.stmt]()
    for node in ast.parse(text).body:
        named = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
        named += [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        parts |= dict.fromkeys(named, node)
    wanted, used = [architecture], dict[str, str]()
    while wanted:
        name = wanted.pop()
        if name in parts and name not in used:
            used[name] = "".join(lines[parts[name].lineno - 1 : parts[name].end_lineno])
            wanted += [node.id for node in ast.walk(parts[name]) if isinstance(node, ast.Name)]
    return "".join(used.values())
