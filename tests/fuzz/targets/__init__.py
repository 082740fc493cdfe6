"""What is attacked, a file each: the name of the file is the target's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import cast

from tests.fuzz.case import Target

# Name -> its share of the cases: where one takes some 30 ms, as opening a whole model does, there are fewer of them.
SHARES = {
    "headers": 3,
    "indices": 3,
    "configs": 1,
    "tables": 3,
    "formulas": 3,
    "recipes": 3,
    "metadata": 3,
    "items": 3,
    "archives": 3,
    "pickles": 3,
    "legacy": 3,
    "records": 3,
    "zarr": 3,
    "params": 2,
    "yamls": 3,
    "sidecars": 3,
    "goldens": 1,
    "manifests": 2,
    "quantized": 1,
    "graphs": 3,
    "batches": 1,
    "servers": 3,
    "listings": 3,
    "notes": 3,
}
NAMES = tuple(SHARES)


def shares(cases: int, names: Iterable[str] = NAMES) -> dict[str, int]:
    """How many cases each target gets, so that all together have `cases` at least."""
    chosen = {name: SHARES[name] for name in names}
    whole = sum(chosen.values())
    return {name: -(-cases * share // whole) for name, share in chosen.items()}


def target(name: str) -> Target:
    """The target of that name; what it needs is imported now."""
    return cast(Target, importlib.import_module(f"{__name__}.{name}").TARGET)
