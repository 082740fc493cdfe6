"""Live models of megatron-core, in a process of their own, that NeMo's doors prune."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.models.megatron_families import EVERY
from tests.oracles import megatron_process


def pruned(name: str, config: dict[str, Any], ids: list[np.ndarray]) -> tuple[np.ndarray, Any]:
    """Logits on the first batch of a live model that `prune_language_model` changed in place, and its sizes."""
    from bridge.compat.nemo_prune import PruningConfig, prune_language_model

    model = megatron_process.filled(name)
    holder = torch.nn.Module()
    holder.module = model
    data = [{"tokens": torch.from_numpy(batch)} for batch in ids]
    given = prune_language_model(holder, PruningConfig(**config), Loader(data), Limited())
    assert given is holder and holder.module is model and model.decoder.config is model.config
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    return megatron_process.answer(model, torch.from_numpy(ids[0])), {
        size: getattr(model.config, size) for size in (*sizes, "moe_layer_freq", "perform_initialization")
    }


class Limited:
    """The part of a trainer that the door reads."""

    limit_val_batches = 3


class Loader:
    """A data module."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def train_dataloader(self) -> list[Any]:
        return self.batches


def refused(name: str) -> dict[str, str]:
    """What the door says to live models that it does not prune; none of them changes."""
    from bridge.compat.nemo_prune import PruningConfig, PruningSizeError, prune_language_model

    messages = {}

    def told(case: str, model: Any, **config: Any) -> None:
        before = dict(vars(model)), dict(vars(model.config))
        try:
            prune_language_model(model, PruningConfig(**config))
        except PruningSizeError as error:
            messages[case] = str(error)
        assert (vars(model), vars(model.config)) == before

    hooked = megatron_process.build(EVERY[name])
    hooked.embedding.register_forward_hook(lambda *_: None)
    told("hook", hooked, drop_layers=[1])
    split = megatron_process.build(EVERY[name])
    split.config.tensor_model_parallel_size = 2
    told("split", split, drop_layers=[1])
    told("layers", megatron_process.build(EVERY[name]), drop_layers=[1, 1, 99])
    return messages
