"""Write the chosen units as a recipe that `quant=` takes."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridge.api import plans
from bridge.api.sensitivity.candidates import Destination
from bridge.api.sensitivity.units import Unit, globs
from bridge.core.errors import UsageError
from bridge.core.values import Structure
from bridge.planning.plan import Plan
from bridge.quant.schemes.catalog import RULE
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source


def recipe_base(quant: str | Path | Scheme, kv: str | None) -> str:
    """The recipe of `quant` and `kv` without new rules; UsageError if no recipe can start from `quant`."""
    scheme = load_scheme(quant)
    name = scheme.name if scheme.name.replace(RULE, "_").isidentifier() and not scheme.rules else ""
    if name and _is_named(scheme):
        return f"base = {json.dumps(name)}\n" + (f"kv   = {json.dumps(kv)}\n" if kv else "")
    path = Path(scheme.origin)
    if not path.is_file() or load_scheme(path) != scheme:
        raise UsageError("a recipe starts from a scheme name or another recipe's file; pass one of them as quant=")
    text = path.read_text(encoding="utf-8")
    try:
        table = tomllib.loads(f"{text}\n[[rule]]\n")
    except tomllib.TOMLDecodeError as cause:
        why = "has its rules in one list; write each as [[rule]], so that rules can be added"
        raise UsageError(f"{path}: {why}") from cause
    if "base" not in table:
        why = "is a whole scheme, but a recipe starts from a built-in scheme; write `base` and rules"
        raise UsageError(f"{path}: {why}")
    first = f"kv = {json.dumps(kv)}\n" if kv and "kv" not in table else ""
    return f"{first}{text.rstrip()}\n"


def recipe(
    base: str, comment: Sequence[str], rules: Sequence[tuple[str, Sequence[Unit]]], modules: Iterable[str]
) -> str:
    """The recipe's text: `comment`, `base`, and one rule for each scheme (or "none") of `rules` with its units."""
    text = "".join(f"# {line}\n" for line in comment) + base
    others, override = list(modules), "override = true\n" if "[[rule]]" in base else ""
    for quant, units in rules:
        if units:
            names = ",\n".join(f"    {json.dumps(name)}" for unit in units for name in globs(unit, others))
            text += f"\n[[rule]]\nmodules = [\n{names},\n]\nquant = {json.dumps(quant)}\n{override}"
    return text


def check_recipe(source: Source, structure: Structure, destination: Destination, text: str) -> Plan:
    """Plan the recipe; PlanError or SchemeError if its conversion would be refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        scheme = plans.scheme_of(path, None, structure, source)
    options = dict(destination.options)
    return plans.plan_of(source, structure, destination.target, scheme, options, destination.runtime)


def _is_named(scheme: Scheme) -> bool:
    try:
        return load_scheme(scheme.name) == scheme
    except UsageError:
        return False
