"""ProphetNet's decoder of any number of tokens behind any number of others.

Once it has a cache, transformers' reads one token at a time. Here positions, distances and masks count from the
tokens in the cache, so that a prompt and a step have one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

from bridge.targets.onnx.export.family import Family


def _decode(self: Any, past_key_values: Any = None, **given: Any) -> Any:
    self.before = self.position_embeddings.before = past_key_values.get_seq_length()
    past_key_values.get_seq_length = lambda *_: 0  # which of its two ways is asked by this alone
    return type(self).forward(self, past_key_values=past_key_values, **given)


def _positions(self: Any, inputs_shape: Any, device: Any, past_key_values: Any = None) -> tuple[Any, Any]:
    if past_key_values is None:  # of the encoder
        states: tuple[Any, Any] = type(self).forward(self, inputs_shape, device)
        return states
    places = torch.arange(inputs_shape[1]) + self.before + self.padding_idx + 1
    places = places.clamp(max=self.max_length - 1).expand(inputs_shape)
    return self._forward(places), places


class _Apart(TorchFunctionMode):
    """Cuts the streams apart by their number; torch would compare it with that of the chunks of their extent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.chunk:
            whole, count = args
            return whole.unflatten(kwargs["dim"], (count, -1)).unbind(kwargs["dim"])
        return func(*args, **(kwargs or {}))


def _attend(self: Any, *args: Any, **given: Any) -> Any:
    with _Apart():
        return type(self).forward(self, *args, **given)


def _places(self: Any, tokens: Any) -> tuple[Any, Any]:
    """The places of the tokens that attend, [tokens, 1], and of all that they may attend to."""
    return (torch.arange(tokens) + self.before)[:, None], torch.arange(self.before + tokens)


def _buckets(self: Any, position_ids: Any) -> list[Any]:
    """Of the distances in the main stream; and in the others, of its tokens and of their own."""
    batch, tokens = position_ids.shape
    row, column = _places(self, tokens)
    main, own = column - row, torch.arange(tokens) - torch.arange(tokens)[:, None]
    return [
        compute_relative_buckets(self.num_buckets, self.relative_max_distance, distances.expand(batch, -1, -1))
        for distances in (main, torch.cat([main - 1, own], 1))
    ]


def _main_mask(self: Any, hidden_states: Any, _: Any) -> Any:
    row, column = _places(self, hidden_states.shape[1])
    return _hide(column > row, hidden_states.dtype)[None, None]


def _other_masks(self: Any, hidden_states: Any, _: Any) -> Any:
    """Each stream sees one token less of the main stream, but always the first, and its own token."""
    tokens = hidden_states.shape[1]
    row, column = _places(self, tokens)
    own = torch.arange(tokens) != torch.arange(tokens)[:, None]
    streams = [torch.cat([(column - row >= 1 - at) & (column != 0), own], 1) for at in range(self.ngram)]
    return _hide(torch.stack(streams), hidden_states.dtype)[None, None]


def _hide(hidden: Any, dtype: torch.dtype) -> Any:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


FAMILY = Family(
    methods={
        "ProphetNetPositionalEmbeddings": {"forward": _positions},
        "ProphetNetNgramSelfAttention": {"forward": _attend},
        "ProphetNetDecoder": {
            "forward": _decode,
            "compute_buffered_relative_buckets": _buckets,
            "prepare_attention_mask": _main_mask,
            "prepare_predict_attention_mask": _other_masks,
        },
    }
)
