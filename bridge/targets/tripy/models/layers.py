"""The layers of ready Tripy modules, plain or quantized as config.json says.

Attributes have the names of Hugging Face's state dicts, so loading renames nothing. Tables and masks are made in
`forward`: a Tensor attribute would be an expected key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nvtripy as tp
from nvtripy.frontend.module.parameter import DefaultParameter  # not public; `frontend.SERIES` pins it

from bridge.core.errors import PlanError, UsageError
from bridge.core.text import nearest
from bridge.targets.tripy.formats import BLOCK
from bridge.targets.tripy.section import Section

MASKED = -3.4028234663852886e38  # of float32; finite as in transformers: a fully masked row must not become NaN


class BlockLinear(tp.Module):
    """A Linear whose int4 weight is stored [in, out] in blocks along `in`, which `tp.Linear` cannot hold.

    Tripy's blocks lie along the first axis, AWQ's along `in`: the weight is multiplied as stored, not transposed.
    AWQ files also hold a `pre_quant_scale`, which the input is multiplied by first.

    >>> class MLP(tp.Module):  # doctest: +SKIP
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.c_fc = BlockLinear(768, 3072, dtype=tp.float16, pre_quant_scale=True)
    ...         self.c_proj = BlockLinear(3072, 768, dtype=tp.float16, pre_quant_scale=True)
    ...
    ...     def forward(self, x):
    ...         return self.c_proj(tp.gelu(self.c_fc(x)))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = tp.float32,
        block: int = BLOCK,
        pre_quant_scale: bool = False,
    ) -> None:
        super().__init__()
        if block < 1 or in_features % block:
            raise UsageError(f"BlockLinear: in_features = {in_features} does not divide into blocks of {block}")
        self.dtype, self.quant_dtype, self.block = dtype, tp.int4, block
        self.weight = DefaultParameter((in_features, out_features), dtype)
        self.weight_scale = DefaultParameter((in_features // block, out_features), dtype)
        self.bias = DefaultParameter((out_features,), dtype) if bias else None
        self.pre_quant_scale = DefaultParameter((in_features,), dtype) if pre_quant_scale else None

    def forward(self, x: Any) -> Any:
        """x: [..., in] -> [..., out]."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale
        codes = tp.quantize(self.weight, self.weight_scale, self.quant_dtype)
        out = x @ tp.dequantize(codes, self.weight_scale, self.dtype)
        return out if self.bias is None else out + self.bias


class SmoothLinear(tp.Linear):
    """A `tp.Linear` that multiplies its input by `pre_quant_scale` first, as SmoothQuant's weights need."""

    def __init__(self, in_features: int, *args: Any, **settings: Any) -> None:
        super().__init__(in_features, *args, **settings)
        self.pre_quant_scale = DefaultParameter((in_features,), self.dtype)

    def forward(self, x: Any) -> Any:
        """x: [..., in] -> [..., out]."""
        return super().forward(x * self.pre_quant_scale)


class RMSNorm(tp.Module):
    """Root mean square in float32, rounded to the model's dtype before the weight is multiplied, as in Llama."""

    def __init__(self, width: int, eps: float, dtype: Any) -> None:
        super().__init__()
        self.eps, self.dtype = eps, dtype
        self.weight = DefaultParameter((width,), dtype)

    def forward(self, x: Any) -> Any:
        """x: [..., width]."""
        wide = tp.cast(x, tp.float32)
        wide = wide * tp.rsqrt(tp.mean(wide * wide, dim=-1, keepdim=True) + self.eps)
        return tp.cast(wide, self.dtype) * self.weight


class Parts:
    """Make the layers of one model by their full names; `unclaimed`: quantized modules that no layer took."""

    def __init__(self, section: Section) -> None:
        self.dtype = getattr(tp, section.dtype)
        self.unclaimed = dict(section.modules)
        self._twice = {*section.copies, *section.copies.values()}

    def stored_twice(self, name: str) -> bool:
        """True if the file has this tensor under a second name, since the source tied the two."""
        return name in self._twice

    def linear(self, name: str, in_features: int, out_features: int, bias: bool = True) -> Any:
        """The Linear of this name, quantized if the section has an entry for it."""
        entry = self.unclaimed.pop(name, None)
        if entry is None:
            return tp.Linear(in_features, out_features, bias, self.dtype)
        if entry.layout == "in_out":
            assert entry.block
            return BlockLinear(in_features, out_features, bias, self.dtype, entry.block, entry.pre_quant_scale)
        kind = SmoothLinear if entry.pre_quant_scale else tp.Linear
        quantized = getattr(tp, entry.quant_dtype)
        return kind(in_features, out_features, bias, self.dtype, quantized, entry.weight_quant_dim)

    def embedding(self, rows: int, width: int) -> Any:
        return tp.Embedding(rows, width, dtype=self.dtype)

    def layer_norm(self, width: int, eps: float) -> Any:
        return tp.LayerNorm(width, dtype=self.dtype, eps=eps)

    def vector(self, width: int) -> Any:
        return DefaultParameter((width,), self.dtype)

    def rms_norm(self, width: int, eps: float) -> RMSNorm:
        return RMSNorm(width, eps, self.dtype)


@dataclass(frozen=True)
class Seen:
    """Values that all layers share: the extents of the token ids, and the keys hidden from each query."""

    batch: Any
    length: Any
    hidden: Any = None  # bool, broadcast to [batch, heads, length, length]

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None, *, causal: bool, window: int | None = None) -> Seen:
        """Hide later keys if `causal`, keys `window` or more positions back, and padding, where the mask is 0."""
        batch, length = input_ids.shape
        hidden = None
        if causal:
            position = tp.arange(length, dtype=tp.int32)
            query, key = tp.unsqueeze(position, 1), tp.unsqueeze(position, 0)
            hidden = key > query if window is None else (key > query) | (query - key >= window)
        if attention_mask is not None:
            padding = tp.unsqueeze(tp.unsqueeze(attention_mask == 0, 1), 1)  # batch, 1, 1, length
            hidden = padding if hidden is None else hidden | padding
        return cls(batch, length, hidden)


@dataclass(frozen=True)
class Heads:
    """The heads of one attention: split, attended, merged."""

    queries: int
    keys: int
    width: int
    scaling: float

    def split(self, x: Any, seen: Seen, count: int) -> Any:
        """[batch, length, count * width] -> [batch, count, length, width]."""
        return tp.transpose(tp.reshape(x, (seen.batch, seen.length, count, self.width)), 1, 2)

    def attend(self, query: Any, key: Any, value: Any, seen: Seen) -> Any:
        """Split heads in, [batch, length, queries * width] out; in float32 for every dtype of the model.

        Its logits are a tenth to a quarter nearer to float32 than those of half-precision attention (GPT-2, Llama,
        Qwen3, both halves), and after int4 and float8 TensorRT needs it, as Tripy's nanoGPT example says.
        """
        dtype, groups = value.dtype, self.queries // self.keys
        query, key, value = (tp.cast(x, tp.float32) for x in (query, key, value))
        if groups != 1:
            key, value = (tp.repeat(x, groups, dim=1) for x in (key, value))
        scores = (query @ tp.transpose(key, -2, -1)) * self.scaling
        if seen.hidden is not None:
            scores = tp.where(seen.hidden, MASKED, scores)
        out = tp.transpose(tp.softmax(scores, dim=-1) @ value, 1, 2)  # batch, length, heads, width
        return tp.cast(tp.reshape(out, (seen.batch, seen.length, self.queries * self.width)), dtype)


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + tp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


# transformers' names; `tp.gelu` is the erf form, and GPT-2's gelu_new the one with tanh (2e-4 apart in the logits).
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": tp.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": tp.relu,
    "silu": tp.silu,
    "swish": tp.silu,
}


def activation(name: str) -> Callable[[Any], Any]:
    """Return the activation that transformers calls `name`, which rounds once; PlanError if there is none here."""
    if name not in ACTIVATIONS:
        raise PlanError(f"config.json: no Tripy activation for {name!r}; {nearest(name, ACTIVATIONS)}")
    inner = ACTIVATIONS[name]
    return lambda x: tp.cast(inner(tp.cast(x, tp.float32)), x.dtype)
