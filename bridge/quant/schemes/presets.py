"""What other tools' names of schemes mean, by `mappings/presets.toml`: `ct:W4A16`, `modelopt:INT8_DEFAULT_CFG`.

A preset is the words of a scheme with some of them replaced; it is parsed as a scheme's file is.
"""

from __future__ import annotations

from typing import Any

from bridge.core.errors import SchemeError, UsageError
from bridge.core.mappings import mappings, table_files
from bridge.core.text import nearest
from bridge.quant.schemes.grammar import check_keys, read_toml

COLON = ":"
ROW_KEYS = {"scheme", "why", "block", "zero_points", "input", "algorithm", "only"}

NOT_OF_PRESETS = ("aliases", "rule", "best_without_data")


def prefixes() -> dict[str, dict[str, Any]]:
    """The tools whose names are known, by the prefix of these."""
    return read_toml(mappings() / "presets.toml")


def preset_names() -> list[str]:
    """Every name that a scheme has, with its prefix."""
    rows = ((prefix, name, row) for prefix, tool in prefixes().items() for name, row in tool["preset"].items())
    return [f"{prefix}{COLON}{name}" for prefix, name, row in rows if "why" not in row]


def is_preset(name: str) -> bool:
    """Whether a name has a tool's prefix, or is one that needs none."""
    return name.partition(COLON)[0].lower() in prefixes() if COLON in name else bool(_bare(name))


def hint_of(name: str) -> str:
    """What to do about a bare name of another tool: the name with its prefix, or why no scheme is that; "" else."""
    tools = prefixes().items()
    rows = {f"{prefix}{COLON}{name.upper()}": tool["preset"].get(name.upper()) for prefix, tool in tools}
    found = [full for full, row in rows.items() if row is not None and "why" not in row]
    if found:
        return f"write {' or '.join(found)}, with that tool's numbers"
    return next((str(row["why"]) for row in rows.values() if row is not None), "")


def preset_words(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a preset's scheme and its words, none if it is one of ours; UsageError if there is no such preset."""
    prefix, _, rest = (name if COLON in name else f"{_bare(name)}{COLON}{name}").partition(COLON)
    prefix, preset, tool = prefix.lower(), rest.upper(), prefixes()[prefix.lower()]
    known = tool["preset"]
    if COLON in rest:
        plain = preset.partition(COLON)[0]
        instead = f"{prefix}{COLON}{plain}, or " if plain in known else ""
        raise UsageError(
            f"quant={name!r}: {prefix}: stands before a preset of {tool['tool']}, which takes no rule; write {instead}"
            "one of our own names, such as int4:gptq"
        )
    if preset not in known:
        raise UsageError(f"quant={name!r}: {tool['tool']} has no preset {rest!r}; {nearest(preset, known)}")
    row = known[preset]
    if "why" in row:
        raise UsageError(f"quant={name!r}: {row['why']}; `qbridge show schemes` lists all")
    if row.keys() == {"scheme"} and not tool["rounding"]:
        return row["scheme"], {}
    return f"{prefix}{COLON}{preset}", _words(row, tool)


def check_presets() -> list[str]:
    """The problems of the table, none if every row can be read."""
    problems = []
    for prefix, tool in prefixes().items():
        for name, row in tool["preset"].items():
            where = f"presets.toml: {prefix}{COLON}{name}"
            try:
                check_keys(row, ROW_KEYS, where)
                if ("why" in row) == ("scheme" in row):
                    raise SchemeError(f"{where}: write `scheme`, or `why` there is none")
                if "scheme" in row:
                    _words(row, tool)
            except SchemeError as error:
                problems.append(str(error))
    return problems


def _bare(name: str) -> str:
    """The prefix that may be left out before a name; "" if none may."""
    return next((p for p, tool in prefixes().items() if tool.get("bare") and name.upper() in tool["preset"]), "")


def _words(row: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """The words of a scheme's file with those of the row in their places."""
    files = (*table_files("schemes"), *table_files("rules"))  # of a layout alone, without a rule
    path = next((file for file in files if file.stem == row["scheme"]), None)
    if path is None:
        raise SchemeError(f"presets.toml: scheme {row['scheme']!r} has no file in mappings/schemes or mappings/rules")
    words: dict[str, Any] = {key: value for key, value in read_toml(path).items() if key not in NOT_OF_PRESETS}
    changes = {key: value for key, value in row.items() if key not in ("scheme", "block", "zero_points")}
    if "algorithm" in changes:
        words.pop("options", None)  # of the other algorithm
    words |= changes
    if not words.get("input", True):  # {}: none
        del words["input"]
    if "zero_points" in row:
        words["weight"] = [{**words["weight"][0], "zero_points": row["zero_points"]}]
    if "block" in row:
        words["weight"] = [{**words["weight"][0], "per": "block", "block": row["block"]}]
    return words | {"rounding": tool["rounding"], "summary": f"{tool['tool']}'s preset"}
