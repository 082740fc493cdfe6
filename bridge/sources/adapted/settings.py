"""Read adapter_config.json; refuse what is not plain LoRA."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIG = "adapter_config.json"

# peft's fields that change how an adapter is applied -> what they are, if they have a value.
_VARIANTS = {
    "alora_invocation_tokens": "activated LoRA, which applies to some tokens alone",
    "arrow_config": "Arrow, which chooses among adapters for each token",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "layer_replication": "LoRA over repeated layers",
    "megatron_config": "LoRA over layers of Megatron",
    "trainable_token_indices": "LoRA with trained tokens (trainable_token_indices)",
}
# Fields that say how it was trained or what it was trained on.
_OTHERS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "alpha_pattern", "bias", "lora_alpha", "lora_bias", "modules_to_save", "r",
    "rank_pattern", "target_parameters", "use_dora", "use_rslora", "ensure_weight_tying", "subfolder",
}  # fmt: skip
# Starts of training after which the stored A and B belong to the base as it is; others change the base as well.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "lora_ga")


@dataclass(frozen=True)
class Settings:
    """What adapter_config.json says of the arithmetic. `base`: the model that it was trained on, "" if unknown."""

    base: str
    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    dora: bool
    bias: str
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]
    content: Mapping[str, Any]

    def rank(self, name: str) -> int:
        """The rank for a module or parameter, by the first pattern that fits as peft matches it."""
        return int(_by_pattern(self.rank_pattern, name, self.r))

    def scaling(self, name: str) -> float:
        """What B @ A is multiplied by."""
        rank, alpha = self.rank(name), _by_pattern(self.alpha_pattern, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    @property
    def largest_rank(self) -> int:
        return max((self.r, *self.rank_pattern.values()))

    @property
    def words(self) -> str:
        """`DoRA of rank 16, alpha 32`."""
        kind = "DoRA" if self.dora else "rsLoRA" if self.rslora else "LoRA"
        several = ", others by pattern" if self.rank_pattern or self.alpha_pattern else ""
        return f"{kind} of rank {self.r}, alpha {self.alpha:g}{several}"

    def over(self, base: str) -> bytes:
        """The file for the same adapter over another base."""
        changed = {**self.content, "base_model_name_or_path": base, "revision": None}
        return (json.dumps(changed, indent=2, sort_keys=True) + "\n").encode()


def _by_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def settings_of(content: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """Return the settings, or all reasons why this is not an adapter that can be merged or kept."""
    kind = content.get("peft_type")
    if kind != "LORA":
        return None, [
            f"an adapter of type {kind or 'unknown'}, not LoRA; apply it with peft (merge_and_unload, where that type "
            "has it), save the model, and give that"
        ]
    problems = [f"{what}; only LoRA, rsLoRA and DoRA are merged" for key, what in _VARIANTS.items() if content.get(key)]
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        problems.append(
            f"init_lora_weights={start!r} changed the base before training; save it as a plain LoRA: peft's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if unknown := sorted(key for key in content if key not in _OTHERS and key not in _VARIANTS and content[key]):
        problems.append(f"{CONFIG} has {', '.join(unknown)}, which no peft up to 0.21 writes; merge it with that peft")
    ranks, alphas = content.get("rank_pattern") or {}, content.get("alpha_pattern") or {}
    r, alpha = content.get("r"), content.get("lora_alpha")
    every_rank = [("r", r), *_items("rank_pattern", ranks)]
    problems += [f"{key}={value!r}: a rank is 1 or more" for key, value in every_rank if _no_rank(value)]
    every_alpha = [("lora_alpha", alpha), *_items("alpha_pattern", alphas)]
    problems += [f"{key}={value!r}: expected a number" for key, value in every_alpha if not _finite(value)]
    for key, pattern in _items("rank_pattern", ranks) + _items("alpha_pattern", alphas):
        if problem := _bad_pattern(key):
            problems.append(f"{key}={pattern!r}: {problem}")
    bias = content.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        problems.append(f"bias={bias!r}: expected none, all or lora_only")
    if problems:
        return None, problems
    base, revision = str(content.get("base_model_name_or_path") or ""), content.get("revision")
    return Settings(
        base=f"{base}@{revision}" if base and revision else base,
        r=int(r or 0),
        alpha=float(alpha or 0),
        rslora=bool(content.get("use_rslora")),
        rank_pattern=dict(ranks),
        alpha_pattern=dict(alphas),
        dora=bool(content.get("use_dora")),
        bias=bias,
        lora_bias=bool(content.get("lora_bias")),
        modules_to_save=_texts(content.get("modules_to_save")),
        target_parameters=_texts(content.get("target_parameters")),
        content=dict(content),
    ), []


def _items(name: str, pattern: Any) -> list[tuple[str, Any]]:
    return [(f"{name}[{key}]", value) for key, value in pattern.items()] if isinstance(pattern, Mapping) else []


def _bad_pattern(key: str) -> str:
    try:
        re.compile(key.partition("[")[2].removesuffix("]"))
    except re.error as error:
        return f"not a regular expression ({error})"
    return ""


def _no_rank(value: Any) -> bool:
    return type(value) is not int or value < 1


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
