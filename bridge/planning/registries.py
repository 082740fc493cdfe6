"""Classes of programs, by their source: `mappings/runtimes/registries`.

The files are made by `python -m tests.oracles.registries`; of each only the line of one architecture is parsed here,
because the whole takes longer than a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bridge.core.mappings import mappings, table_text
from bridge.core.parsing.limited import parse_toml
from bridge.core.ranges import requirements
from bridge.core.values import Structure
from bridge.core.version import installed


@dataclass(frozen=True)
class Served:
    """What a program's source says of an architecture.

    `file`: has its class, below the program's package. `fused`: names of modules that it holds as one matrix. `plain`:
    modules that it makes unquantized, whatever a checkpoint has there: ends of their names, without numbers.
    """

    file: str
    fused: tuple[tuple[str, ...], ...] = ()
    plain: tuple[tuple[str, ...], ...] = ()

    def leaves(self, module: str) -> bool:
        """Whether the program makes a module unquantized.

        >>> Served("model.py", plain=(("indexer", "wk"),)).leaves("model.layers.0.self_attn.indexer.wk")
        True
        """
        words = tuple(word for word in module.split(".") if not word.isdecimal())
        return any(words[-len(end) :] == end for end in self.plain)


def has_registry(program: str) -> bool:
    """Whether it was looked up which architectures a program, as users type it, has a class for."""
    return (mappings() / "runtimes/registries" / f"{program}.toml").is_file()


@cache
def served(program: str, architecture: str) -> Served | None:
    """What a program's source says of an architecture; None if it has no class for it, or was not looked up."""
    if not has_registry(program):
        return None
    begin = f'"{architecture}" = '
    text = table_text(mappings() / "runtimes/registries" / f"{program}.toml")
    line = next((line for line in text.splitlines() if line.startswith(begin)), "")
    if not line:
        return None
    row = parse_toml(line)[architecture]
    fused = tuple(tuple(words.split()) for words in row.get("fused", ()))
    return Served(row["file"], fused, tuple(tuple(words.split(".")) for words in row.get("plain", ())))


@cache
def first_transformers(architecture: str) -> str:
    """The first version of transformers with a class; "" if the oldest that is supported has it, or none is known."""
    begin = f'"{architecture}" = '
    text = table_text(mappings() / "runtimes/registries/transformers-since.toml")
    return next((line.removeprefix(begin).strip('"') for line in text.splitlines() if line.startswith(begin)), "")


def why_too_old(config: Mapping[str, Any]) -> str:
    """Why the installed transformers has no class for a config, if a later one has; else ""."""
    names, found = config.get("architectures"), installed("transformers")
    name = str(names[0]) if isinstance(names, list) and names else ""
    first = first_transformers(name)
    if not first or not found:
        return ""
    from packaging.version import Version

    if Version(found) >= Version(first):
        return ""
    ranges = [need.specifier for need in requirements("trt") if need.name == "transformers"]
    ends = [f",{entry}" for specifier in ranges for entry in specifier if entry.operator == "<"]
    return (
        f"transformers {found}, which is installed, has no class {name}; {first} is the first that has it: "
        f"pip install 'transformers>={first}{''.join(ends)}'"
    )


def leave_plain(structure: Structure, program: str, title: str) -> Structure:
    """The structure with the modules kept that a program makes unquantized, unless a recipe names them."""
    known = served(program, structure.architecture)
    if known is None or not any(known.leaves(site.module) for site in structure.sites):
        return structure
    why = f"{title} makes it unquantized"
    return replace(
        structure,
        sites=tuple(
            replace(site, keep=why) if not site.keep and known.leaves(site.module) else site for site in structure.sites
        ),
    )
