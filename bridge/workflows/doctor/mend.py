"""Decide what a repair changes: names, tensors, JSON.

Scalars and headers are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.planning.drafts import without_promise
from bridge.sources.quantized.checkpoint import without
from bridge.sources.quantized.fields import CONFIGS
from bridge.workflows.doctor.checkpoint import Checkpoint
from bridge.workflows.doctor.finding import Finding
from bridge.workflows.doctor.model import heads, ties
from bridge.workflows.doctor.modules import LISTS, mended
from bridge.workflows.doctor.rescale import Rescaled
from bridge.workflows.doctor.scales import above, cache_names, unequal


@dataclass(frozen=True)
class Mending:
    """A repaired checkpoint. `names`: tensor -> its name there, for all that stay.

    `rescaled`: tensor -> the weight that it belongs to, and which part it is. `modelopt`: hf_quant_config.json, None
    without one.
    """

    names: Mapping[str, str]
    rescaled: Mapping[str, tuple[Rescaled, str]]
    config: dict[str, Any]
    modelopt: dict[str, Any] | None


def mend(checkpoint: Checkpoint, findings: Iterable[Finding]) -> Mending:
    """What mends the findings that can be mended without the source."""
    rules = {finding.rule for finding in findings if finding.repairs}
    config, modelopt = copy.deepcopy(checkpoint.config), copy.deepcopy(checkpoint.modelopt)
    names = {name: name for name in checkpoint.specs} | (cache_names(checkpoint) if "kv-names" in rules else {})
    if "head-twice" in rules:
        del names[heads(checkpoint)[0]]
    for part in ties(config) if rules & {"head-differs", "head-missing"} else ():
        part["tie_word_embeddings"] = "head-missing" in rules
    if "drafts" in rules:
        config = without_promise(config, checkpoint.specs)
    if "leftover" in rules:
        config, modelopt = without(config), None
    elif rules & {"ignored-codes", "not-ignored"}:
        _set_list(config, modelopt, checkpoint.method, mended(checkpoint))
    rescaled = _rescaled(checkpoint) if "global-scales" in rules else {}
    return Mending(names, rescaled, config, modelopt)


def _rescaled(checkpoint: Checkpoint) -> dict[str, tuple[Rescaled, str]]:
    tensors = {}
    for group in unequal(checkpoint):
        largest = max(group, key=above)
        for weight in group:
            one = Rescaled(weight, largest.number("scale_2"))
            for part in ("codes", "scale", "scale_2") if above(weight) != above(largest) else ():
                tensors[weight.parts[part].spec.name] = (one, part)
    return tensors


def _set_list(config: dict[str, Any], modelopt: dict[str, Any] | None, method: str, entries: list[str]) -> None:
    """Put a list of unquantized modules into both files, under the keys that they have."""
    holders = [holder for holder in (config, *config.values()) if isinstance(holder, dict)]
    found = [holder[key] for holder in holders for key in CONFIGS if isinstance(holder.get(key), dict)]
    inner = (modelopt or {}).get("quantization")
    for section in [*found, *([inner] if isinstance(inner, dict) else [])]:
        known = [key for key in LISTS[method] if key in section]
        key = "exclude_modules" if section is inner and method == "modelopt" else LISTS[method][0]
        section[known[0] if known else key] = list(entries)
