"""Read the contracts of `mappings/runtimes`, one file per program and version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from bridge.core.errors import UsageError
from bridge.core.mappings import TableFile, read_table, table_files
from bridge.core.text import nearest
from bridge.planning.contracts import FLAGS
from bridge.planning.faults import FAULTS
from bridge.planning.programs import Contract, Evidence, Row, Runtime, SparseKernels

KEYS = ("program", "version", "aliases", "fused", "not_run", "instead", "mistakes", "faults", "writes")
OF_TARGETS = ("graphs", "tokens", "gpus", "elsewhere", "multiplies")  # sections that targets and pages read
# key of a section -> its type; a section has evidence in the last ones
CONTRACT_KEYS: dict[str, type] = {
    "target": str, "options": dict, "prescales": bool, "kept": bool, "unlike": bool, "kv": dict, "loads": dict,
    "stacked": dict, "split": dict, "mixed": dict, "either": dict, "head": dict, "plain": dict, "ranks": dict,
    "sparse": dict, "buffers": dict, "but_not": list, "float32_as": str,
}  # fmt: skip
CONDITIONS: dict[str, type] = {
    "whole": bool, "parts": bool, "beside": bool,
    "out": int, "in": int, "held": int, "experts": bool, "prescales": bool, "dtypes": list, "but_not": list,
    "only": list, "inputs": str, "computes": str, "since": str,
}  # fmt: skip
HOW = ("run", "built", "read")
_NUMERIC = (
    r"(?:none|(?:fp8|fp4|int[2-68]|q[45]_[01]|q[2-6]_k|iq4_nl|iq4_xs|affine[2-68])"
    r"(?: tensor| channel| token| block \d+(?: \d+)?)(?: e4m3| e8m0)?(?: zeros)?(?: dynamic)?)"
)
NUMERIC = re.compile(_NUMERIC)
WORDS = re.compile(rf"{_NUMERIC}(?: \+ {_NUMERIC})* \| {_NUMERIC}")
_NAME_END = re.compile(r"[\s=@<>~!]")
_VERSION = re.compile(r"(?P<name>.+?)\s*(?:==|@|=| )\s*v?(?P<version>[a-z]?\d[\w.]*)", re.IGNORECASE)


@cache
def runtimes() -> tuple[Runtime, ...]:
    """Every program that has a contract, by name."""
    return tuple(parse_runtime(path.stem, read_table(path)) for path in table_files("runtimes"))


def runtime_names() -> list[str]:
    """The names that `runtime=` (`--for`) takes."""
    return [runtime.name for runtime in runtimes()]


def find_runtime(name: str) -> Runtime | None:
    """The program of that name or alias, in any case; None if no contract has it."""
    word = name.lower()
    return next((known for known in runtimes() if word in (known.name, known.program.lower(), *known.aliases)), None)


def load_runtime(given: str) -> Runtime:
    """The program that a user named, as `vllm` or `vllm==0.33`; UsageError without a contract for it.

    >>> load_runtime("vLLM").name
    'vllm'
    """
    if not isinstance(given, str):
        raise UsageError(f"runtime takes a name, not {type(given).__name__}; known: {', '.join(runtime_names())}")
    match = _VERSION.fullmatch(given.strip())
    name, version = (match["name"], match["version"]) if match else (given.strip(), "")
    runtime = find_runtime(name)
    if runtime is None and (named := find_runtime(_NAME_END.split(name, maxsplit=1)[0])):
        raise UsageError(
            f"runtime {given!r} (--for): a version is written {named.name}=={named.version}; that is the one that "
            f"{named.program} has a contract for, and {named.name!r} alone means it, too"
        )
    if runtime is None:
        raise UsageError(f"runtime {given!r} (--for) has no contract; {nearest(name.lower(), runtime_names())}")
    if version and not f"{version}.".startswith(f"{runtime.version}."):  # 0.33.1 is a patch of 0.33
        raise UsageError(
            f"runtime {given!r} (--for): no contract was written for version {version} of {runtime.program}; there is "
            f"one for {runtime.version}: pass {runtime.name!r} if your version loads the same"
        )
    return runtime


def parse_runtime(name: str, file: TableFile) -> Runtime:
    """Parse one file; TableError names the row."""
    file.known_keys((*KEYS, *OF_TARGETS))
    for key in ("program", "version"):
        if not isinstance(file.data.get(key), str):
            raise file.place("", key).error(f"`{key}` is missing", hint=f'{key} = "..."')
    contracts = tuple(_contract(file, section) for section in file.section("writes"))
    if not contracts:
        raise file.place("", "writes").error("no [writes.NAME] says what it loads")
    fused = tuple(tuple(words.split()) for words in file.words("fused"))
    if alone := [words for words in fused if len(words) < 2]:
        raise file.place("", "fused").error(f"{' '.join(alone[0])!r} is fused with nothing", hint='"gate_proj up_proj"')
    mistakes = file.texts("mistakes")
    for words in mistakes:
        if " " in words and not WORDS.fullmatch(words):
            raise file.place("mistakes", words).error(_no_words(words), hint=HINT)
    faults = {rule: _fault(file, rule, value) for rule, value in file.section("faults").items()}
    return Runtime(
        name, file.data["program"], file.data["version"], contracts, file.words("aliases"), fused, mistakes, faults,
        file.words("not_run"), str(file.data.get("instead", "")),
    )  # fmt: skip


def _fault(file: TableFile, rule: str, value: Any) -> str:
    """What a program makes of a fault: `{ does = "...", read = "..." }` in a sentence."""
    if rule not in FAULTS:
        raise file.place("faults", rule).error(f"unknown fault `{rule}`", hint=nearest(rule, FAULTS))
    evidence = _evidence(file, "faults", rule, value, {"does": str})
    if not isinstance(value.get("does"), str) or not value["does"]:
        raise file.place("faults", rule).error("it is not said what it does", hint='does = "drops them"')
    return f"{value['does']} ({evidence.how}: {evidence.where})"


HINT = '"fp8 tensor | fp8 tensor", "int4 block 128 | none"'


def _no_words(words: str) -> str:
    return f"{words!r} is not `weights | inputs` as `qbridge show runtimes` writes them"


def _contract(file: TableFile, name: str) -> Contract:
    section = f"writes.{name}"
    words = file.section(section)
    for key, value in words.items():
        if key not in CONTRACT_KEYS:
            raise file.place(section, key).error(f"unknown key `{key}`", hint=nearest(key, CONTRACT_KEYS))
        if type(value) is not CONTRACT_KEYS[key]:
            raise file.place(section, key).error(f"`{key}` is {_kind(CONTRACT_KEYS[key])}, not {value!r}")
    if "target" not in words:
        raise file.header(section).error("`target` is missing", hint='target = "hf"')
    if (dtype := words.get("float32_as", "")) and dtype not in FLAGS:
        raise file.place(section, "float32_as").error(f"dtype {dtype!r} is unknown", hint=nearest(dtype, FLAGS))
    rows = {part: file.section(f"{section}.{part}") for part in ("loads", "kv")}
    known: dict[str, Any] = {
        key: _evidence(file, section, key, words[key])
        for key in ("mixed", "either", "head", "ranks", "buffers")
        if key in words
    }
    known |= {
        kind: {name: _evidence(file, f"{section}.{kind}", name, how) for name, how in words.get(kind, {}).items()}
        for kind in ("stacked", "split")
    }
    return Contract(
        words["target"],
        words.get("options", {}),
        {key: _row(file, f"{section}.loads", key, value, WORDS) for key, value in rows["loads"].items()},
        {key: _row(file, f"{section}.kv", key, value, NUMERIC) for key, value in rows["kv"].items()},
        prescales=words.get("prescales", True),
        kept=words.get("kept", True),
        unlike=words.get("unlike", True),
        but_not=tuple(words.get("but_not", ())),
        float32_as=dtype,
        plain=_row(file, section, "plain", words["plain"]) if "plain" in words else None,
        sparse=_sparse(file, section, words["sparse"]) if "sparse" in words else None,
        **known,
    )


def _sparse(file: TableFile, section: str, value: Mapping[str, Any]) -> SparseKernels:
    evidence = _evidence(file, section, "sparse", value, {"option": str})
    if not isinstance(value.get("option"), str) or not value["option"]:
        raise file.place(section, "sparse").error(
            "it is not said what asks for sparse kernels", hint='option = "trt_sparsity_enable"'
        )
    return SparseKernels(evidence, value["option"])


def _row(file: TableFile, section: str, key: str, value: Any, form: re.Pattern[str] | None = None) -> Row:
    place = file.place(section, key)
    evidence = _evidence(file, section, key, value, CONDITIONS)
    if form and not form.fullmatch(key):
        raise place.error(_no_words(key), hint=HINT)
    given = {name: value[name] for name in value if name not in HOW}
    for name, condition in given.items():
        if type(condition) is not CONDITIONS[name]:
            raise place.error(f"`{name}` is {_kind(CONDITIONS[name])}, not {condition!r}")
        if type(condition) is int and condition < 1:
            raise place.error(f"{name} = {condition}: matrices have a multiple of it, so it is at least 1")
        if isinstance(condition, list) and not all(isinstance(word, str) for word in condition):
            raise place.error(f"`{name}` is a list of names, not {condition!r}")
    for dtype in given.get("dtypes", ()):
        if dtype not in FLAGS:
            raise place.error(f"dtype {dtype!r} is unknown", hint=nearest(dtype, FLAGS))
    conditions = {"inner" if name == "in" else name: condition for name, condition in given.items()}
    lists = {name: tuple(words) for name, words in conditions.items() if isinstance(words, list)}
    return Row(evidence, **conditions | lists)


def _evidence(file: TableFile, section: str, key: str, value: Any, more: Mapping[str, type] = {}) -> Evidence:
    """Evidence is `{ run = "test file" }`, as `built`, or `{ read = "file of the source" }`; `more`: keys beside it."""
    place = file.place(section, key)
    given = value if isinstance(value, Mapping) else {}
    known = [how for how in HOW if isinstance(given.get(how), str) and given[how]]
    if len(known) != 1:
        hint = '{ run = "tests/targets/hf/test_vllm.py" } or { read = "a file of its source" }'
        raise place.error("it is not said how this is known", hint=hint)
    for name in given:
        if name not in (*HOW, *more):
            raise place.error(f"unknown key `{name}`", hint=nearest(name, [*HOW, *more]))
    return Evidence(known[0], given[known[0]])


def _kind(type_: type) -> str:
    return {str: "a string", bool: "true or false", dict: "a table", int: "a whole number", list: "a list"}[type_]
