"""A config.json for checkpoints that have none: Megatron's, NeMo's, torchtitan's, Meta's; reads no weight.

told    = megatron_told("run_config.yaml", read_yaml(text, "run_config.yaml"))
derived = hf_config("the/checkpoint", "megatron", told, specs, given=config)
derived.config, derived.terms["centered"]
"""

from __future__ import annotations

from typing import Any

from bridge.errors import SourceError, nearest
from bridge.sources.foreign_config.derive import Derived, Told, hf_config
from bridge.sources.foreign_config.megatron import megatron_terms, unsaid
from bridge.sources.foreign_config.meta import meta_told
from bridge.sources.foreign_config.said import Given, Said, Saying
from bridge.sources.foreign_config.writers import WRITERS
from bridge.sources.foreign_config.yaml_data import read_yaml

__all__ = ["Derived", "Given", "Said", "Saying", "Told", "hf_config", "megatron_told", "meta_told", "read_yaml"]


def megatron_told(kind: str, raw: Any, where: str | None = None) -> Told:
    """Read what a configuration says; `kind`: the file it stands in, as `WRITERS` names it.

    >>> raw = {"config": {"_target_": "nemo...Llama2Config7B", "num_layers": 3}}
    >>> megatron_told("context/model.yaml", raw).terms["layers"]
    Said(value=3, where='context/model.yaml: config.num_layers')
    """
    if kind not in WRITERS:
        raise SourceError(f"{kind}: no configuration that is known here; {nearest(kind, WRITERS)}")
    fields = WRITERS[kind](raw, where or kind)
    terms, problems = megatron_terms(fields)
    return Told(terms, tuple(problems), unsaid(fields))
