"""Writes a choice of units as a recipe that `quant=` takes; must never write one that reads back otherwise."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridge.costs.units import Unit, globs
from bridge.errors import UsageError
from bridge.quant.scheme import Scheme, load_scheme


def recipe_base(quant: str | Path | Scheme, kv: str | None) -> str:
    """The recipe that `quant` and `kv` are without any rule of ours; UsageError where no recipe can start from it."""
    scheme = load_scheme(quant)
    name = scheme.name if scheme.name.isidentifier() and not scheme.rules else ""
    if name and _is_named(scheme):
        return f"base = {json.dumps(name)}\n" + (f"kv   = {json.dumps(kv)}\n" if kv else "")
    path = Path(scheme.origin)
    if not path.is_file() or load_scheme(path) != scheme:
        raise UsageError(
            "a recipe starts from a scheme's name or from another recipe's file: pass quant= as one of them"
        )
    text = path.read_text(encoding="utf-8")
    try:
        words = tomllib.loads(f"{text}\n[[rule]]\n")
    except tomllib.TOMLDecodeError as cause:
        raise UsageError(
            f"{path}: writes its rules in one list; write each as [[rule]], so that more can follow"
        ) from cause
    if "base" not in words:
        raise UsageError(f"{path}: is a whole scheme, and a recipe starts from one that ships: write `base` and rules")
    first = f"kv = {json.dumps(kv)}\n" if kv and "kv" not in words else ""
    return f"{first}{text.rstrip()}\n"


def recipe(base: str, said: Sequence[str], lifted: Sequence[Unit], quant: str, modules: Iterable[str]) -> str:
    """The recipe's text: `said` as a comment, `base`, and one rule that gives `quant` to `lifted`."""
    head = "".join(f"# {line}\n" for line in said)
    if not lifted:
        return head + base
    others = list(modules)
    names = ",\n".join(f"    {json.dumps(name)}" for unit in lifted for name in globs(unit, others))
    override = "override = true\n" if "[[rule]]" in base else ""
    return f"{head}{base}\n[[rule]]\nmodules = [\n{names},\n]\nquant = {json.dumps(quant)}\n{override}"


def _is_named(scheme: Scheme) -> bool:
    try:
        return load_scheme(scheme.name) == scheme
    except UsageError:
        return False
