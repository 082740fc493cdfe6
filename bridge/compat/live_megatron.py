"""Prune a live GPTModel of Megatron-Core; record the tokens that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bridge.core.errors import CalibrationError
from bridge.sources.live_models.megatron import fill, why_split
from bridge.sources.pruned.source import PrunedSource

FIELDS = {  # of Megatron's configuration by dim
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "layers": "num_layers",
}
# Arguments of GPTModel that it keeps under their names.
ARGUMENTS = (
    "vocab_size", "max_sequence_length", "pre_process", "post_process", "fp16_lm_cross_entropy", "parallel_output",
    "share_embeddings_and_output_weights", "position_embedding_type", "rotary_percent", "rotary_base", "pg_collection",
)  # fmt: skip


def why_not(model: Any) -> str:
    """Say why this GPTModel cannot be rebuilt; "" if it can."""
    if split := why_split(model):
        return f"{split}: only a model that is whole on this rank is pruned in memory; prune its checkpoint"
    if model.mtp_process:
        return "it predicts several tokens (mtp_block_spec), which is not pruned"
    if any(hasattr(module, "_modelopt_state") for module in model.modules()):
        return "ModelOpt has changed it; prune the plain model first"
    hooked = [name or "itself" for name, module in model.named_modules() if module._forward_hooks]
    if hooked:
        return f"it has forward hooks on {', '.join(hooked[:4])}, which a rebuilt model would lose; remove them first"
    return ""


def recorded(model: Any, loop: Callable[[], Any]) -> Callable[[Any], None]:
    """Return a forward loop for the transformers model of these weights, which runs what `loop` runs through `model`.

    `loop` runs once, when it is first needed. A step of a generation from a cache is not kept: its prompt is.

    Raises:
        CalibrationError: from the loop: no tokens reached the model.
    """
    import torch

    batches: list[Any] = []

    def keep(_: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        ids, positions = (*args, None, None)[:2]
        ids, positions = named.get("input_ids", ids), named.get("position_ids", positions)
        begins = positions is None or not positions.numel() or int(positions.reshape(-1)[0]) == 0
        if ids is not None and begins:
            batches.append(ids.detach().cpu().clone())

    def replay(twin: Any) -> None:
        if not batches:
            with torch.no_grad(), model.register_forward_pre_hook(keep, with_kwargs=True):
                loop()
        if not batches:
            raise CalibrationError(f"forward_loop ran no tokens through {type(model).__name__}; calibration needs some")
        device = next(twin.parameters()).device
        for ids in batches:
            twin(input_ids=ids.to(device))

    return replay


def rebuild(model: Any, smaller: PrunedSource) -> None:
    """Give `model` the modules of a smaller one: the same object, so whoever holds it sees the pruned model.

    Its configuration changes in place, too; kv_channels stays. If anything fails, the model is as it was.
    """
    import torch

    old = {_layerless(name): tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "dtype")}
    settings = {name: getattr(model, name) for name in ARGUMENTS}
    spec = _cut_spec(model.transformer_layer_spec, smaller.kept.layers)
    with _sized(model.config, smaller):
        new = type(model)(model.config, spec, **settings, rope_scaling=model.rotary_scaling)
        for name, tensor in new.state_dict(keep_vars=True).items():
            if hasattr(tensor, "dtype"):
                like = old[_layerless(name)]
                tensor.data = tensor.data.to(like.device, like.dtype)
        with torch.no_grad():
            fill(new, smaller)
    if hasattr(model, "rotary_pos_emb"):  # a head stays as wide, and some of its arguments are kept nowhere
        new.rotary_pos_emb = model.rotary_pos_emb
    new.train(model.training)
    model.__dict__ = new.__dict__


@contextmanager
def _sized(config: Any, smaller: PrunedSource) -> Iterator[None]:
    """The configuration with the sizes of the pruned model; as before if what runs inside fails."""
    before = dict(vars(config))
    kept, count = smaller.kept, before["num_layers"]
    for dim, field in FIELDS.items():
        if dim in kept.after and kept.after[dim] != kept.before[dim]:
            setattr(config, field, kept.after[dim])
    if "kv_heads" not in kept.after and before["num_query_groups"] == before["num_attention_heads"]:
        config.num_query_groups = config.num_attention_heads
    for field, value in _by_layer(before, count, kept.layers).items():
        setattr(config, field, value)
    initializes, config.perform_initialization = config.perform_initialization, False  # every value is overwritten
    try:
        yield
        config.perform_initialization = initializes
    except BaseException:
        vars(config).clear()
        vars(config).update(before)
        raise


def _by_layer(before: Mapping[str, Any], count: int, layers: Sequence[int]) -> dict[str, list[int]]:
    """What the configuration says of each layer, of those that are left."""
    changed: dict[str, list[int]] = {}
    if len(layers) == count:
        return changed
    for field in ("moe_layer_freq", "window_attn_skip_freq"):
        every = before.get(field)
        if isinstance(every, int) and every > 1:  # Megatron counts layers with experts from 0, full ones from 1
            of_layer = {"moe_layer_freq": [int(n % every == 0) for n in range(count)]}
            every = of_layer.get(field) or [int((n + 1) % every > 0) for n in range(count)]
        if isinstance(every, list | tuple):
            changed[field] = [every[layer] for layer in layers]
    return changed


def _cut_spec(spec: Any, layers: Sequence[int]) -> Any:
    """A specification with a module for each layer, of the layers that are left; one for all stays."""
    own = getattr(spec, "layer_specs", None)
    return dataclasses.replace(spec, layer_specs=[own[layer] for layer in layers]) if own else spec


def _layerless(name: str) -> str:
    """A tensor's name without its numbers: those of all layers and experts have one dtype."""
    return ".".join("{}" if part.isdecimal() else part for part in name.split("."))
