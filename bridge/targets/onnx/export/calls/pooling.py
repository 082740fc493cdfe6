"""Make one vector of a text's states, as sentence-transformers does."""

from __future__ import annotations

from typing import Any

import torch

EMBEDDING = "sentence_embedding"  # as optimum names the output


def pooled(states: Any, mask: Any, pooling: str) -> Any:
    """[batch, tokens, features] and the mask [batch, tokens] -> [batch, features]. `pooling`: see `read_pooling`.

    Means are taken in float32, as sentence-transformers does: half sums overflow, and count to 256 in bfloat16.
    """
    mode, _, normalized = pooling.partition(" ")
    kept = mask[..., None].to(states.dtype)
    if mode == "mean":
        kept = kept.float()
        vector = ((states.float() * kept).sum(1) / kept.sum(1).clamp(min=1e-9)).to(states.dtype)
    elif mode == "max":
        vector = states.masked_fill(kept == 0, torch.finfo(states.dtype).min).amax(1)
    else:  # the first or the last token that is not padding, which may be on either side
        places = torch.arange(1, mask.shape[1] + 1)
        order = places if mode == "lasttoken" else mask.shape[1] + 1 - places
        at = (mask.to(torch.int32) * order.to(torch.int32)).argmax(1)
        vector = states.gather(1, at[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
    return torch.nn.functional.normalize(vector, dim=-1) if normalized else vector
