"""Live models of megatron-core, in a process of their own, that NeMo's doors prune."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.models.megatron_families import EVERY, VOCAB
from tests.oracles import megatron_process
from tests.oracles.megatron_process import SEQUENCE


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


def converted(name: str, out: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits of a live model, held as NeMo 1 does, whose conversion is in `out`."""
    import bridge

    model, ids = megatron_process.filled(name), megatron_process._ids()
    model.config.layernorm_zero_centered_gamma = EVERY[name].zero_centred  # which the stand-ins of its norms cannot say
    kind = type("MegatronGPTModel", (torch.nn.Module,), {"__module__": "nemo.collections.nlp.models"})
    holder = kind()
    holder.model = torch.nn.Module()
    holder.model.module = model
    bridge.convert(holder, "hf", out=out, config={"vocab_size": VOCAB}, verify=False, progress=False)
    return ids.numpy(), megatron_process.answer(model, ids)


def quantized(name: str, out: str) -> dict[str, Any]:
    """What `Quantizer` does with a live model that `forward_loop` runs as NeMo does: prompts, then a cached step."""
    from bridge.compat.nemo import ExportConfig, QuantizationConfig, Quantizer

    model, ids, ran = megatron_process.filled(name), megatron_process._ids(), []

    def loop(given: Any) -> None:
        assert given is holder
        for begin, rows in ((0, ids[:1]), (0, ids[1:]), (SEQUENCE, ids[:, :1])):
            positions = torch.arange(begin, begin + rows.shape[1]).expand_as(rows)
            mask = torch.ones(1, 1, rows.shape[1], rows.shape[1]).triu(1).bool()
            ran.append(given.module(rows, positions, mask).shape)

    holder = torch.nn.Module()
    holder.module = model
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if hasattr(tensor, "clone")}
    quantizer = Quantizer(QuantizationConfig("fp8", enable_kv_cache=False), ExportConfig(out, "hf"))
    report = quantizer.export(quantizer.quantize(holder, loop))
    same = all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items() if key in before)
    return {"ran": len(ran), "same": same, "passed": report.passed, "ids": ids.numpy()}


def split(name: str) -> str:
    """What opening says to a live model that is not whole."""
    from bridge.sources.opening import open_source

    model = megatron_process.build(EVERY[name])
    model.config.tensor_model_parallel_size = 2
    try:
        open_source(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
