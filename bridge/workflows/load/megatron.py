"""What a live GPTModel of Megatron-Core takes of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from bridge.sources.source import Source
from bridge.targets.megatron import SPECS

if TYPE_CHECKING:
    from bridge.planning.plan import Plan

# Fields that decide how a model reads its tensors, although no shape shows them.
MEANING = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "gated_linear_unit",
    "layernorm_zero_centered_gamma", "normalization", "num_moe_experts", "moe_router_topk", "qk_layernorm",
    "multi_latent_attention",
)  # fmt: skip


def options_for(models: Sequence[Any]) -> list[dict[str, Any]]:
    """Options of target megatron that may give the model's names: its padded vocabulary, specs of layers, drafts."""
    first = models[0]
    drafts = {} if getattr(first.config, "mtp_num_layers", None) else {"drafts": "drop"}
    return [{"vocab_multiple": int(first.vocab_size), "spec": spec, **drafts} for spec in SPECS]


def unlike(model: Any, source: Source, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield fields of the model's configuration that a model of the checkpoint has otherwise."""
    from bridge.targets.dcp.megatron_layout import Layout

    layout = Layout(source.config, source.specs, plan.options["vocab_multiple"])
    section: Mapping[str, Any] = yaml.safe_load(layout.run_config(plan))["model"]
    own = vars(model.config) | {"rotary_base": getattr(model, "rotary_base", None)}
    for name in (*MEANING, "rotary_base"):
        ours, theirs = section.get(name), own.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"config.{name}", f"is {theirs} in the model, {ours} in the checkpoint"
    if own.get("rotary_interleaved"):
        yield "config.rotary_interleaved", "is on in the model; the checkpoint's heads are in halves"
