"""A live GPTModel of Megatron-Core: as a source, and filled from one.

Its configuration and tensors are translated as those of a checkpoint are; nothing of Megatron is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, dtype_word, from_float32, to_float32
from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.checkpoint import HfSource
from bridge.sources.configs.derive import Declared
from bridge.sources.configs.facts import Fact
from bridge.sources.configs.megatron import megatron_terms, refusals, terms_without_value
from bridge.sources.dialects.opening import STATE, Foreign, source_of
from bridge.sources.dialects.tensors import weights_of
from bridge.sources.memory import bits_of, values_digest
from bridge.sources.source import Source
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.translate import Translated, translate

# Field of Megatron-Core's configuration -> attribute of the GPTModel that has it.
_OF_MODEL = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_sequence_length",
    "position_embedding_type": "position_embedding_type",
    "rotary_percent": "rotary_percent",
    "rotary_base": "rotary_base",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "rope_scaling": "rotary_scaling",
}


class LiveSource(HfSource):
    """A GPTModel in memory, in Hugging Face's names."""

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config and all values: there is no file with a modification time."""
        return values_digest(self.config, self.specs, self.read)


def gpt_model(model: object) -> Any:
    """Megatron-Core's GPTModel inside `model`, below wrappers and models of NeMo; None if there is none."""
    while True:
        if hasattr(model, "module"):
            model = model.module
        elif any(kind.__module__.startswith("nemo.") for kind in type(model).__mro__) and hasattr(model, "model"):
            model = model.model  # NeMo 1
        else:
            break
    kinds = type(model).__mro__
    found = any(kind.__name__ == "GPTModel" and kind.__module__.startswith("megatron.core.") for kind in kinds)
    return model if found else None


def why_split(model: Any) -> str:
    """What says that this GPTModel is not whole on this rank; "" if it is."""
    config = model.config
    axes = ("tensor", "pipeline", "expert", "expert_tensor")
    sizes = {f"{axis}_model_parallel_size": getattr(config, f"{axis}_model_parallel_size", 1) for axis in axes}
    sizes["context_parallel_size"] = config.context_parallel_size
    split = [f"{name} is {size}" for name, size in sizes.items() if size not in (None, 1)]
    return ", ".join([*split, "sequence_parallel is on"] if config.sequence_parallel else split)


def open_live(model: Any, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open a GPTModel that is whole on this rank, in Hugging Face's names; its memory is read when asked for.

    `config`, `tokenizer`: as `open_source` takes them. Raises SourceError if it is not whole, or if no supported
    architecture has its configuration.
    """
    where = f"{type(model).__name__} in memory"
    if split := why_split(model):
        raise SourceError(f"{where}: {split}: only a model that is whole on this rank is read; give its checkpoint")
    fields = {name: Fact(value, f"{where}: {name}") for name, value in _fields(model).items() if value is not None}
    terms, problems = megatron_terms(fields)
    declared = Declared(terms, tuple(problems), terms_without_value(fields), refusals(fields))
    tensors = _Tensors(model)
    live = Foreign(Path(), where, "megatron", declared, lambda _: tensors, config, kind=LiveSource)
    return source_of(live, tokenizer)


def fill(model: Any, source: Source) -> None:
    """Overwrite every tensor of a GPTModel by those of `source`, which takes the dtype of each source tensor.

    A tensor of int64 positions goes the way of a checkpoint's values, so it tells where each value of the source lies.
    """
    where, centered = f"{type(model).__name__} in memory", model.config.layernorm_zero_centered_gamma
    dialect, positions = load_dialect("megatron"), _Positions(model)
    dims = {name: int(centered) if name == "centered" else 1 for name in dialect.dims}
    tensors, translation = translate(dialect, source.config, dims, positions.specs.values(), where)
    plain = {name: _unshifted(tensor) for name, tensor in tensors.items()}
    weights = weights_of(positions, translation.native, plain)
    left = {name: spec.size for name, spec in positions.specs.items() if name not in translation.ignored}
    for name, tensor in tensors.items():
        values, at = _values(source, name, tensor), weights.read(name)
        for stored in {translation.native[block.source].stored for block in tensor.blocks}:
            first = positions.first[stored]
            inside = (at >= first) & (at < first + positions.specs[stored].size)
            _put(positions.state[stored], at[inside] - first, values[inside], source.specs[name].dtype)
            left[stored] -= int(inside.sum())
    if missing := [name for name, count in left.items() if count]:
        raise SourceError(f"{where}: {source.where} does not fill {', '.join(missing[:8])}")


class _Tensors:
    """The tensors of a module's state dict as a container."""

    skipped: Mapping[str, int] = {}
    files = ()

    def __init__(self, model: Any) -> None:
        state = model.state_dict()
        self.objects = tuple(name for name in state if name.endswith(STATE))
        self.state = {name: tensor for name, tensor in state.items() if name not in self.objects}
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, tuple(tensor.shape), dtype_word(tensor.dtype)) for name, tensor in self.state.items()
        }

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        flat = self.state[name].detach().reshape(-1)[begin:end]
        out[...] = bits_of(flat, self.specs[name].dtype).reshape(out.shape)
        return out

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        return "", 0


class _Positions(_Tensors):
    """The same tensors, whose values are their own positions, counted on from tensor to tensor from `first`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.specs = {name: replace(spec, dtype="int64") for name, spec in self.specs.items()}
        self.first: dict[str, int] = {}
        for name, spec in self.specs.items():
            self.first[name] = sum(self.specs[last].size + self.first[last] for last in list(self.first)[-1:])
            assert spec.shape

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        out[...] = np.arange(self.first[name] + begin, self.first[name] + end).reshape(out.shape)
        return out


def _unshifted(tensor: Translated) -> Translated:
    return replace(tensor, blocks=tuple(replace(block, shift=0) for block in tensor.blocks))


def _values(source: Source, name: str, tensor: Translated) -> np.ndarray:
    """The source's values as the module stores them: norms less one if it does so."""
    values, dtype = source.read(name), source.specs[name].dtype
    shift = tensor.blocks[0].shift
    return from_float32(to_float32(values, dtype) - np.float32(shift), dtype) if shift else values


def _put(tensor: Any, at: np.ndarray, values: np.ndarray, dtype: str) -> None:
    """Write values (any shape) at positions of a torch tensor that the module holds."""
    import torch

    bits = torch.from_numpy(np.ascontiguousarray(values).view(DTYPES[dtype].storage))
    plain = bits.view(getattr(torch, dtype)).to(tensor.device, tensor.dtype)
    tensor.detach().view(-1)[torch.from_numpy(np.ascontiguousarray(at)).to(tensor.device)] = plain


def _fields(model: Any) -> dict[str, Any]:
    """Megatron-Core's fields of a model: its configuration's, and those that only the model has."""
    fields = dict(vars(model.config)) | {field: getattr(model, name) for field, name in _OF_MODEL.items()}
    fields["activation_func"] = _function(model.config.activation_func)
    rope = getattr(model, "rotary_pos_emb", None)
    if rope is not None:
        fields["seq_len_interpolation_factor"] = getattr(rope, "seq_len_interpolation_factor", None)
    if rope is not None and model.rotary_scaling:
        fields["rope_scaling_factor"] = _scaled_by(rope, model)
    return fields


def _function(function: Callable[..., Any]) -> str:
    """The name of an activation: functions are compiled, scripted, or have arguments bound."""
    if isinstance(function, functools.partial):
        return "gelu_pytorch_tanh" if function.keywords.get("approximate") == "tanh" else _function(function.func)
    return str(getattr(function, "__name__", None) or getattr(function, "name", function))


def _scaled_by(rope: Any, model: Any) -> float:
    """The factor of Llama 3.1's RoPE, which the model does not keep: its slowest frequency is divided by it."""
    count = len(rope.inv_freq)
    plain: float = float(model.rotary_base) ** (-(count - 1) / count)
    return float(round(plain / float(rope.inv_freq[-1]), 3))
