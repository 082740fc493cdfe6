"""Read what a configuration of Megatron or NeMo declares.

declared = megatron_told("run_config.yaml", read_yaml(text, "run_config.yaml"))
derived  = hf_config("the/checkpoint", "megatron", declared, specs, given=config)
derived.config, derived.terms["centered"]
"""

from __future__ import annotations

from typing import Any

from bridge.core.errors import SourceError
from bridge.core.text import nearest
from bridge.sources.configs.derive import Declared
from bridge.sources.configs.megatron import megatron_terms, unsaid
from bridge.sources.configs.writers import WRITERS


def megatron_told(kind: str, raw: Any, where: str | None = None) -> Declared:
    """Read the terms of a configuration; `kind`: its file, as `WRITERS` names it.

    >>> raw = {"config": {"_target_": "nemo...Llama2Config7B", "num_layers": 3}}
    >>> megatron_told("context/model.yaml", raw).terms["layers"]
    Fact(value=3, where='context/model.yaml: config.num_layers')
    """
    if kind not in WRITERS:
        raise SourceError(f"{kind}: not a known configuration; {nearest(kind, WRITERS)}")
    fields = WRITERS[kind](raw, where or kind)
    terms, problems = megatron_terms(fields)
    return Declared(terms, tuple(problems), unsaid(fields))
