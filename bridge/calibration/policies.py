"""What happens to a statistic that cannot be used: zero, not finite, never seen. No bad number leaves, none is hidden.

error   stop, and name the modules
floor   a scale of one (amax = the largest code), which codes zeros as zeros
peers   the maximum of the other experts of the same layer; where there are none: `error` for what was never seen,
        `floor` for zero
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from bridge.errors import CalibrationError, fold_layers
from bridge.quant.calibration import Applied
from bridge.quant.grammar import Policies
from bridge.values import Site


def settle(
    found: Mapping[str, float | None], what: str, sites: Iterable[Site], bounds: Mapping[str, float], policies: Policies
) -> tuple[dict[str, np.ndarray], list[Applied]]:
    """Return usable amax values as float32 scalars, and the policies that were applied to get them.

    `found` maps modules to their amax, None where no token arrived; `bounds` to the magnitude of the largest code.
    """
    family = {s.module: (s.layer, s.module.rpartition(".")[2]) for s in sites if s.expert is not None}
    largest: dict[tuple[int | None, str], float] = {}
    for module, value in found.items():
        if module in family and _case(value) == "":
            largest[family[module]] = max(largest.get(family[module], 0.0), float(value or 0.0))
    settled: dict[str, np.ndarray] = {}
    applied: list[Applied] = []
    refused: dict[str, list[str]] = {}
    for module, value in found.items():
        case = _case(value)
        if not case:
            settled[module] = np.asarray(value, np.float32)
            continue
        policy = {"zero": policies.zero, "never seen": policies.never_seen}.get(case, policies.not_finite)
        peer = largest.get(family[module]) if module in family else None
        if policy == "peers" and peer is None:
            policy = "floor" if case == "zero" else "error"
        if policy == "error":
            refused.setdefault(case, []).append(module)
            continue
        chosen = float(peer or 0.0) if policy == "peers" else bounds[module]
        settled[module] = np.asarray(chosen, np.float32)
        applied.append(Applied(module, what, case, policy, chosen))
    if refused:
        raise CalibrationError("\n  ".join([f"{what} cannot be used", *(_words(c, m) for c, m in refused.items())]))
    return settled, applied


def _case(value: float | None) -> str:
    if value is None:
        return "never seen"
    if not math.isfinite(value):
        return "not finite"
    return "zero" if value <= 0 else ""


def _words(case: str, modules: list[str]) -> str:
    hint = {
        "never seen": 'no calibration token reached them; give other data, or keep them with a recipe (quant = "none")',
        "not finite": "their input overflows or is NaN; check weights and data, or calibrate in bfloat16 or float32",
    }.get(case, "their input was zero throughout; give other data, or set the policy `zero` to floor")
    return f"{case}: {', '.join(fold_layers(modules))}: {hint}"
