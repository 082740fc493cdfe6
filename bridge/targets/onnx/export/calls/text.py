"""The calling convention of an exported graph.

Names, example inputs and dynamic axes. Every layer has a growing cache, even if transformers would cut it at a sliding
window: the mask does the sliding, so inputs and outputs have the same form in all layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.calls.states import GROWS, cache_of, filled, slots
from bridge.targets.tasks import Task

# Pairwise different, and neither 0 nor 1, for which torch would specialize.
BATCH, SEQUENCE, PAST = 2, 3, 5
STATES = "cache_params"  # the cache of models that keep states alone
Axes = tuple[str | int, ...]  # a word is dynamic, a number static
Bounds = Mapping[str, tuple[int | None, int | None]]  # the least and the largest extent of an axis
Kept = tuple[list[tuple[str, Any]], ...]  # by layer: kind and tensor of what it keeps
EMBEDDING = "sentence_embedding"  # as optimum names the output


@dataclass(frozen=True)
class Call:
    """The arguments of `torch.export`, and readable names of inputs and outputs."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]
    taps: tuple[str, ...] = ()  # outputs that only mark K and V inside the graph


class _Tap(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A cache layer that only keeps the inputs of attention, for graphs without a cache."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0


class Wrapped(nn.Module):
    """A model with another forward."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Flat(nn.Module):
    """A model that takes named tensors and a flat list of past keys and values and returns a flat tuple."""

    def __init__(
        self,
        model: nn.Module,
        outputs: tuple[str, ...],
        layer: type | None = None,
        kept: Kept = (),
        pooling: str = "",
        **options: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs
        self.layer = layer
        self.kinds = [[kind for kind, _ in layer] for layer in kept]
        self.pooling = pooling
        self.options = options

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        if self.layer is None:
            out = self.model(**inputs, **self.options, return_dict=True)
            vector = [pooled(out["last_hidden_state"], inputs["attention_mask"], self.pooling)] if self.pooling else []
            return (*(out[name] for name in self.outputs), *vector)
        cache = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = [], self.layer
        if past:
            # `DynamicCache([(k, v), ...])` would concatenate each past with an empty constant first.
            cache = filled(self.model.config, self.kinds, past)
        name = cache_name(self.model)
        if name == STATES and "attention_mask" in inputs:  # such models read the mask of the new tokens alone
            inputs = inputs | {"attention_mask": inputs["attention_mask"][:, -inputs["input_ids"].shape[1] :]}
        out = self.model(**inputs, **{name: cache}, use_cache=True, return_dict=True)
        kept = (slots(layer) if past else [("", layer.keys), ("", layer.values)] for layer in cache.layers)
        return (*(out[name] for name in self.outputs), *(tensor for layer in kept for _, tensor in layer or []))


def cache_name(model: Any) -> str:
    """The argument that takes the cache."""
    return STATES if STATES in inspect.signature(model.forward).parameters else "past_key_values"


def text_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, *, cache: bool, pooling: str = "") -> Call:
    """Return the call of a text model: an encoder, or a decoder with or without a cache.

    pooling: adds the output `sentence_embedding`.
    """
    accepted = inspect.signature(model.forward).parameters
    names = [n for n in task.inputs if n in accepted and n not in ("pixel_values", "bool_masked_pos")]
    if "token_type_ids" in names and not getattr(model.config, "type_vocab_size", 0):
        names.remove("token_type_ids")
    past, fixed = PAST if task.cached and cache else 0, _fixed(model.config)
    # CANINE makes a state of some characters, and attends in windows
    block, window = (getattr(model.config, key, 1) for key in ("downsampling_rate", "local_transformer_stride"))
    if fixed:
        names.remove("attention_mask")
        _drop_mask(model)
    with mode:
        inputs = {n: _example(n, past, fixed or SEQUENCE * window) for n in names}
        probe, kept = _probe(model, inputs, task, cache)
        flat = [(f"{i}.{kind}", tensor) for i, layer in enumerate(kept) for kind, tensor in layer]
        shapes = {slot: tuple(map(int, tensor.shape)) for slot, tensor in flat}
        grows = {slot: GROWS.get(slot.rpartition(".")[2], 0) for slot in shapes}
        pasts = [torch.zeros(extents(shapes[s], grows[s], BATCH, PAST), dtype=t.dtype) for s, t in flat] if past else []
    # Without a cache, models slice a table of positions, for which torch needs a declared bound.
    bound = getattr(model.config, "max_position_embeddings", None) or -1  # XLNet's too: it has no table
    bound = None if past or bound < 0 else bound
    # torch does not trace eager attention's mask for one token as well; the resulting graph holds for one.
    least = 2 if task.cached and model.config._attn_implementation == "eager" else 2 * block if block > 1 else 1
    batch, sequence, cached = Dim("batch"), Dim("sequence", min=least, max=bound), Dim("past")
    # A Dim cannot express past + sequence: the mask's axis is left to torch.
    tokens = {n: Dim.DYNAMIC if past and n == "attention_mask" else sequence for n in names}
    axes = {n: {0: batch} if fixed else {0: batch, 1: tokens[n]} for n in names}
    length: str | int = fixed or "sequence"
    total = "total_sequence" if past else length
    feeds: dict[str, Axes] = {n: ("batch", total if n == "attention_mask" else length) for n in names}
    gives: dict[str, Axes] = {n: _axes(n, probe[n].shape, length) for n in probe}
    if pooling:
        gives[EMBEDDING] = ("batch", int(probe["last_hidden_state"].shape[-1]))
    for slot, s in shapes.items():
        if past:
            feeds[f"past_key_values.{slot}"] = extents(s, grows[slot], "batch", "past_sequence")
        gives[f"present.{slot}"] = extents(s, grows[slot], "batch", total)
    layer = (DynamicLayer if past else _Tap) if shapes else None
    return Call(
        Flat(model, tuple(probe), layer, kept, pooling, **({"use_cache": False} if task.cached else {})),
        (inputs, pasts),
        (axes, [{0: batch} | ({grows[slot]: cached} if grows[slot] else {}) for slot in shapes] if past else []),
        feeds,
        gives,
        () if past else tuple(f"present.{slot}" for slot in shapes),
    )


def dynamic_axes(feeds: Mapping[str, Axes], bounds: Bounds, guarded: str = "") -> dict[str, dict[int, Any]]:
    """The dynamic axes of each input; those of one name have one extent.

    guarded: the axis on whose extent code branches, though each branch gives the same graph: torch need not prove it.
    """
    names = dict.fromkeys(axis for axes in feeds.values() for axis in axes if isinstance(axis, str))
    dims: dict[str, Any] = {}
    for name in names:
        least, most = bounds.get(name, (None, None))
        dims[name] = Dim.DYNAMIC if name == guarded else Dim(name, min=least, max=most)
    return {n: {at: dims[axis] for at, axis in enumerate(axes) if isinstance(axis, str)} for n, axes in feeds.items()}


def extents(shape: Sequence[int], grows: int, batch: str | int, length: str | int) -> Any:
    """The extents of what a layer keeps, with those of the batch and of the axis that grows; 0: none does."""
    return tuple(batch if at == 0 else length if at == grows else n for at, n in enumerate(shape))


def _fixed(config: Any) -> int:
    """The one length of texts that the landmarks of Nystromformer take; 0 for models of any length."""
    length = getattr(config, "segment_means_seq_len", 0)
    return int(length) if length != getattr(config, "num_landmarks", 0) else 0


def _drop_mask(model: Any) -> None:
    """Let attention by landmarks read no mask, in place: transformers' does not fit them, so that no text is padded."""
    for module in model.modules():
        if hasattr(module, "iterative_inv"):
            module.register_forward_pre_hook(lambda _, args: (args[0], None, *args[2:]))


def _example(name: str, past: int, length: int) -> torch.Tensor:
    if name == "attention_mask":
        return torch.ones(BATCH, past + length, dtype=torch.long)
    if name == "position_ids":
        return torch.arange(past, past + length).expand(BATCH, length).contiguous()
    return torch.zeros(BATCH, length, dtype=torch.long)


def _probe(model: Any, inputs: dict[str, Any], task: Task, cache: bool) -> tuple[dict[str, Any], Kept]:
    """Run the model once on fake tensors; return its outputs, and what each layer keeps."""
    short = {n: t[:, -SEQUENCE:] if task.cached else t for n, t in inputs.items()}
    kept: Kept = ()
    if task.cached:
        filling = cache_of(model.config)
        try:
            out = model(**short, **{cache_name(model): filling}, use_cache=True, return_dict=True)
        except (AttributeError, LookupError, ValueError, TypeError) as error:
            if cache:
                raise _no_cache(model, "it keeps a state of another form") from error
        found = [slots(layer) for layer in filling.layers]
        if cache and (None in found or not any(found)):
            raise _no_cache(model, "a layer keeps something other than keys, values and states")
        kinds = {kind for layer in found for kind, _ in layer or []}
        if cache or (all(found) and kinds <= {"key", "value"}):
            kept = tuple(layer or [] for layer in found)
    if not kept:
        out = model(**short, **({"use_cache": False} if task.cached else {}), return_dict=True)
    return {n: out[n] for n in task.outputs if out.get(n) is not None}, kept


def other_cache(model: Any) -> ExportError:
    """What a decoder of several graphs is refused with."""
    return ExportError(
        f"{type(model).__name__}: its decoder keeps something other than keys and values of all tokens\n"
        "  hint   convert it with target `hf`, which needs no graph"
    )


def _no_cache(model: Any, reason: str) -> ExportError:
    return ExportError(
        f"{type(model).__name__}: a graph with a cache needs keys and values per layer "
        f"(past_key_values.N.key/value), which this architecture does not have: {reason}\n"
        "  hint   convert it with target `hf`, which needs no graph"
    )


def _axes(name: str, shape: Any, length: str | int) -> Axes:
    """Every text output is [batch, length, features], [batch, features], or a question's [batch, length]."""
    positions = len(shape) == 3 or name in ("start_logits", "end_logits")
    return ("batch", length, *map(int, shape[2:])) if positions else ("batch", *map(int, shape[1:]))


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
