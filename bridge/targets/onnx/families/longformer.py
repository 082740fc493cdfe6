"""Longformer and LED, which attend within windows and to global tokens.

transformers pads a text to whole windows outside the attention, reads as a Python bool whether any token is global, and
cuts overlapping chunks by strides. Here each block of half a window attends to itself and its two neighbours, whatever
the length, and `nonzero` finds the global tokens, so that a graph's cost grows with their number.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def _at(x: Any, places: Any) -> Any:
    """Tokens of [batch, length, ...] at [blocks, places]; a slice or a pad of dynamic extents would be guarded."""
    return x.index_select(1, places.flatten()).unflatten(1, places.shape)


def _softmax(scores: Any, hidden: Any) -> Any:
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).type_as(scores)


def attend(
    self: Any,
    hidden_states: Any,
    is_index_masked: Any = None,
    is_index_global_attn: Any = None,
    is_global_attn: Any = None,
    **_: Any,
) -> tuple[Any]:
    """Each token attends to the `side` tokens on both sides of it, and to global ones; these attend to all."""
    batch, length, width = hidden_states.shape
    side, heads = self.one_sided_attn_window_size, self.num_heads
    count = (length + side - 1) // side
    last, begins = torch.arange(length).amax(0), torch.arange(count)[:, None] * side
    own, near = begins + torch.arange(side), begins + torch.arange(3 * side) - side
    query, key, value = (
        self.query(hidden_states) / math.sqrt(self.head_dim),
        self.key(hidden_states),
        self.value(hidden_states),
    )
    inside = near.clamp(min=0).minimum(last)
    # batch, heads, blocks, side or 3 side, features
    q, k, v = (
        _at(x, places).unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)
        for x, places in ((query, own.minimum(last)), (key, inside), (value, inside))
    )
    far = (near[:, None] - own[..., None]).abs() > side
    unseen = far | (near < 0)[:, None] | (near > last)[:, None]  # blocks, side, 3 side
    unusual = _at(is_index_masked | is_index_global_attn, inside)
    hidden = (unseen | unusual[:, :, None])[:, None]

    text, place = is_global_attn
    at = text * length + place  # among all tokens of the batch
    global_key, global_value = (
        x.reshape(batch * length, heads, -1).index_select(0, at).transpose(0, 1) for x in (key, value)
    )
    to_global = q @ global_key.transpose(1, 2)[:, None]
    others = (text != torch.arange(batch)[:, None])[:, None, None, None].expand(batch, 1, count, side, -1)
    probabilities = _softmax(torch.cat([q @ k.transpose(-1, -2), to_global], -1), torch.cat([hidden, others], -1))
    attended = probabilities[..., : 3 * side] @ v + probabilities[..., 3 * side :] @ global_value[:, None]
    attended = attended.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2).index_select(1, torch.arange(length))
    attended = attended.masked_fill(is_index_masked[..., None], 0.0).reshape(batch * length, width)

    answered = _of_global(self, hidden_states, is_index_masked, text, at)
    attended = attended.index_put((at,), answered)
    return (attended.reshape(batch, length, width),)


def _of_global(self: Any, hidden_states: Any, is_index_masked: Any, text: Any, at: Any) -> Any:
    """The outputs of global tokens, which attend to all of their text.

    text: of each global token.  at: its place among all tokens of the batch.
    """
    batch, length, _ = hidden_states.shape
    heads, every = self.num_heads, hidden_states.flatten(0, 1)
    query = (self.query_global(every.index_select(0, at)) / math.sqrt(self.head_dim)).unflatten(-1, (heads, -1))
    key, value = (
        project(hidden_states).reshape(batch * length, heads, -1).transpose(0, 1)
        for project in (self.key_global, self.value_global)
    )
    elsewhere = is_index_masked.flatten() | (
        text[:, None] != torch.arange(batch)[:, None].expand(batch, length).flatten()
    )
    answered = _softmax(query.transpose(0, 1) @ key.transpose(1, 2), elsewhere) @ value
    return answered.transpose(0, 1).flatten(1)


def masks_of(like: Any, attention_mask: Any, global_attention_mask: Any) -> dict[str, Any]:
    """Which tokens are padding, and which are global, and where these are."""
    shape = like.shape[:2]
    masked = torch.zeros(shape, dtype=torch.bool) if attention_mask is None else attention_mask == 0
    everywhere = torch.zeros(shape, dtype=torch.bool) if global_attention_mask is None else global_attention_mask != 0
    everywhere = everywhere & ~masked
    places = everywhere.nonzero().unbind(1)
    return {"is_index_masked": masked, "is_index_global_attn": everywhere, "is_global_attn": places}


def _longformer(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    global_attention_mask: Any = None,
    token_type_ids: Any = None,
    position_ids: Any = None,
    inputs_embeds: Any = None,
    **_: Any,
) -> Any:
    from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

    states = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
    masks = masks_of(states, attention_mask, global_attention_mask)
    for layer in self.encoder.layer:
        states = layer(states, **masks)[0]
    pooled = None if self.pooler is None else self.pooler(states)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


def _answer(self: Any, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, **given: Any) -> Any:
    """The tokens of the question, before the first separator, are global."""
    end = (input_ids == self.config.sep_token_id).int().argmax(1, keepdim=True)
    question = (torch.arange(input_ids.shape[1]) < end).long()
    given |= {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
    return type(self).forward(self, input_ids, global_attention_mask=question, **given)


FAMILY = Family(
    methods={
        "LongformerSelfAttention": {"forward": attend},
        "LongformerModel": {"forward": _longformer},
        "LongformerForQuestionAnswering": {"forward": _answer},
    },
    counted=True,
)
