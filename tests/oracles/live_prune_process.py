"""A process that prunes a live GPTModel."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.oracles import distill_process, megatron_process

SIZES = [
    {"target_ffn_hidden_size": 192},
    {"target_hidden_size": 96},
    {"target_num_attention_heads": 2, "target_num_query_groups": 2},
    {"target_num_layers": 3},
    {"drop_layers": [2]},
]  # fmt: skip


def main(store: str) -> list[dict[str, Any]]:
    """What `pruned` says of all `SIZES`; gloo meets in the file `store`."""
    warnings.simplefilter("ignore")
    megatron_process.start(0, 1, 1, store)
    return [pruned(given) for given in SIZES]


def pruned(given: dict[str, Any]) -> dict[str, Any]:
    """Prune one model; its answers beside those of transformers with the weights that bridge.pruned keeps."""
    from bridge.compat.nemo_prune import PruningConfig, prune_language_model

    ids = torch.randint(0, distill_process.VOCAB, (8, 16), generator=torch.Generator().manual_seed(0))
    model = distill_process._model(128, 4, 1, 1).eval()
    holder = [model]
    made = prune_language_model(model, PruningConfig(**given), [{"input_ids": ids}])
    positions = torch.arange(16).expand(8, -1)
    with torch.no_grad():
        answer = made(ids, positions, None)
    config = made.config
    sizes = [config.num_layers, config.hidden_size, config.ffn_hidden_size, config.num_attention_heads]
    same = holder[0] is made
    values = sum(param.numel() for param in made.parameters())
    again = made(ids, positions, None, labels=ids.roll(-1, 1)).mean()
    again.backward()
    expected = _expected(given, ids)
    return {
        "same": same, "sizes": sizes, "groups": config.num_query_groups,
        "channels": config.kv_channels, "values": values,
        "error": float((answer - expected).abs().max() / expected.abs().max()),
        "trains": all(param.grad is not None for param in made.parameters()),
    }  # fmt: skip


def _expected(given: dict[str, Any], ids: Any) -> Any:
    """Answers of the same cut of the same weights in transformers."""
    import bridge
    from bridge.compat.nemo_prune import PruningConfig
    from bridge.sources.live_models.megatron import open_live

    model, config = distill_process._model(128, 4, 1, 1).eval(), PruningConfig(**given)
    source = bridge.pruned(
        open_live(model), config.keep or None, drop_layers=config.dropped, data=[{"input_ids": ids}],
        importance="minitron", order="importance", progress=False,
    )  # fmt: skip
    with torch.no_grad():
        return source.load_model()(input_ids=ids).logits
