"""The tensors that a server loads, made of a model in memory at every iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import DTYPES
from bridge.core.formats.safetensors import stored_shape
from bridge.core.values import TensorSpec
from bridge.planning.plan import Plan
from bridge.streaming.context import ConversionContext
from bridge.streaming.run import check_ties
from bridge.workflows.live.digests import Digest
from bridge.workflows.live.encoding import Encoder, Groups

if TYPE_CHECKING:
    import torch

    from bridge.sources.memory import MemorySource


@dataclass(frozen=True)
class TensorMeta:
    """One tensor as a server receives it; known from the plan, and equal on every rank."""

    name: str
    """Its name in the checkpoint, `model.layers.0.mlp.down_proj.weight_scale`."""
    dtype: str
    """The name of its dtype in torch, `float8_e4m3fn`; 4-bit codes are `uint8`, two to a byte."""
    shape: tuple[int, ...]
    """Its shape as it is stored, (64, 88)."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return TensorSpec(self.name, self.shape, self.dtype).nbytes


class Tensors:
    """Iterate over it for the names and full tensors of a checkpoint, in the order of `metadata`.

    Every iteration reads the weights anew: a step of an optimizer is seen by the next one. `plan` says what is written.
    """

    def __init__(
        self, context: ConversionContext, model: MemorySource, files: Mapping[str, bytes], config: dict[str, Any],
        memory: int,
    ) -> None:  # fmt: skip
        self.plan: Plan = context.plan
        self.config = config
        """`quantization_config` of config.json, for the first start of the server; {} without quantization."""
        self.files = files
        """config.json and the files beside it, by name: with these a server starts with weights of its own."""
        self._context, self._model = context, model
        self._encoder = Encoder(context, Groups(context.plan), memory)

    @cached_property
    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor in the order of an iteration; reads no weight."""
        return tuple(_meta(output.spec) for output in self.plan.outputs)

    def __len__(self) -> int:
        return len(self.metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, on the model's device; each has memory of its own."""
        import torch

        self._model.renew()
        check_ties(self._context)
        device, metadata = self._model.device, iter(self.metadata)
        for _, arrays in self._encoder.run():
            while arrays:
                meta = next(metadata)
                plain = torch.from_numpy(arrays.pop(0)).view(getattr(torch, meta.dtype))
                yield meta.name, plain.reshape(meta.shape).to(device)

    def digest(self) -> str:
        """SHA-256 of the tensors as they are now: one pass. `bridge.live.digest` gives the same of a directory."""
        whole = Digest()
        for meta, (_, tensor) in zip(self.metadata, self, strict=True):
            whole.add(meta.name, meta.dtype, meta.shape, [_memory(tensor)])
        return whole.hexdigest()


def _meta(spec: TensorSpec) -> TensorMeta:
    return TensorMeta(spec.name, "uint8" if DTYPES[spec.dtype].bits == 4 else spec.dtype, stored_shape(spec))


def _memory(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
