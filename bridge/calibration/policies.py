"""Policies for unusable statistics: zero, not finite or never seen.

error   stop, and name the modules
floor   a scale of one (amax = the largest code), which quantizes zeros to zeros
peers   the maximum of the other experts of the same layer; without any: `error` if never seen, `floor` for zero
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bridge.core.errors import CalibrationError
from bridge.core.text import fold_layers
from bridge.core.values import Site
from bridge.quant.calibration import Applied
from bridge.quant.schemes.grammar import Policies

IMPORTANCE = "importance"  # of inputs, in what `applied` lists
HINTS = {
    "never seen": 'no calibration token reached them; give other data, or keep them with a recipe (quant = "none")',
    "not finite": "their input overflows or is NaN; check weights and data, or calibrate in bfloat16 or float32",
    "zero": "their input was zero throughout; give other data, or set the policy `zero` to floor",
}


@dataclass(frozen=True)
class Measured:
    """Sums of x^2 of a module's input by `in`, and the number of tokens. `expert`: routers choose which reach it."""

    sums: np.ndarray
    tokens: float
    expert: bool


def settle(
    values: Mapping[str, float | None],
    what: str,
    sites: Iterable[Site],
    bounds: Mapping[str, float],
    policies: Policies,
    needed: Collection[str] | None = None,
) -> tuple[dict[str, np.ndarray], list[Applied]]:
    """Return usable amax values as float32 scalars, and the policies that were applied.

    `values` maps modules to their amax, None if no token arrived; `bounds` to the magnitude of the largest code.
    `needed`: the modules whose amax will be used, None for all; an error of others is ignored and its amax left out.
    """
    family = {s.module: (s.layer, s.module.rpartition(".")[2]) for s in sites if s.expert is not None}
    largest: dict[tuple[int | None, str], float] = {}
    for module, value in values.items():
        if module in family and _case(value) == "":
            largest[family[module]] = max(largest.get(family[module], 0.0), float(value or 0.0))
    settled: dict[str, np.ndarray] = {}
    applied: list[Applied] = []
    refused: dict[str, list[str]] = {}
    for module, value in values.items():
        case = _case(value)
        if not case:
            settled[module] = np.asarray(value, np.float32)
            continue
        policy = {"zero": policies.zero, "never seen": policies.never_seen, "not finite": policies.not_finite}[case]
        peer = largest.get(family[module]) if module in family else None
        if policy == "peers" and peer is None:
            policy = "floor" if case == "zero" else "error"
        if policy == "error":
            if needed is None or module in needed:
                refused.setdefault(case, []).append(module)
            continue
        chosen = float(peer or 0.0) if policy == "peers" else bounds[module]
        settled[module] = np.asarray(chosen, np.float32)
        applied.append(Applied(module, what, case, policy, chosen))
    _check_refused(what, refused)
    return settled, applied


def settle_importance(
    measured: Mapping[str, Measured], policies: Policies, needed: Collection[str] | None = None
) -> tuple[dict[str, np.ndarray], tuple[Applied, ...]]:
    """Return mean squares as float32, and the policies that were applied.

    An expert that no token reached weighs all inputs alike, as in llama.cpp, and so does a module whose inputs were all
    zero, unless the scheme's policy is an error. `needed`: modules that will be quantized, None for all; others that
    cannot be used are left out.
    """
    settled: dict[str, np.ndarray] = {}
    applied: list[Applied] = []
    refused: dict[str, list[str]] = {}
    for module, one in measured.items():
        case, allowed = "", True
        with np.errstate(over="ignore", invalid="ignore"):
            mean = (one.sums / max(one.tokens, 1)).astype(np.float32)
        if not one.tokens:
            case, allowed = "never seen", one.expert and policies.never_seen != "error"
        elif not np.isfinite(mean).all():
            case, allowed = "not finite", False
        elif not mean.any():
            case, allowed = "zero", policies.zero != "error"
        if case and allowed:
            mean = np.ones_like(mean)
            applied.append(Applied(module, IMPORTANCE, case, "ones", 1.0))
        if allowed:
            settled[module] = mean
        elif needed is None or module in needed:
            refused.setdefault(case, []).append(module)
    _check_refused(f"{IMPORTANCE} matrix", refused)
    return settled, tuple(applied)


def _check_refused(what: str, refused: Mapping[str, list[str]]) -> None:
    """CalibrationError if the policies allow none for some modules, by case."""
    if refused:
        lines = [f"{case}: {', '.join(fold_layers(modules))}: {HINTS[case]}" for case, modules in refused.items()]
        raise CalibrationError("\n  ".join([f"{what} cannot be used", *lines]))


def _case(value: float | None) -> str:
    if value is None:
        return "never seen"
    if not math.isfinite(value):
        return "not finite"
    return "zero" if value <= 0 else ""
