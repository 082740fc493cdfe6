"""The tensors that a server loads, made anew at every iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import DTYPES
from bridge.core.errors import LiveError, SourceError
from bridge.core.formats.safetensors import stored_shape
from bridge.core.text import size
from bridge.core.values import TensorSpec
from bridge.planning.plan import Output, Plan, Step
from bridge.streaming.context import ConversionContext
from bridge.streaming.run import check_ties
from bridge.workflows.live.digests import Digest
from bridge.workflows.live.encoding import Encoder, Groups
from bridge.workflows.live.gathering import ShardedEncoder
from bridge.workflows.live.parts import Part, Place, is_constant
from bridge.workflows.live.sharded import SharedSource

if TYPE_CHECKING:
    import torch

    from bridge.sources.memory import MemorySource
    from bridge.workflows.live.megatron import MegatronSource


@dataclass(frozen=True)
class TensorMeta:
    """One tensor as a server receives it; known from the plan, and equal on every rank."""

    name: str
    """Its name in the checkpoint, `model.layers.0.mlp.down_proj.weight_scale`."""
    dtype: str
    """The name of its dtype in torch, `float8_e4m3fn`; 4-bit codes are `uint8`, two to a byte."""
    shape: tuple[int, ...]
    """Its shape as it is stored, (64, 88)."""
    owner: int | None = None
    """The rank that alone yields it from `local()`; None if all ranks do."""
    sharded: bool = False
    """Whether `local()` yields the rows of a rank, cut as `torch.chunk` cuts them; else it yields the whole tensor."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return TensorSpec(self.name, self.shape, self.dtype).nbytes


class Tensors:
    """Iterate over it for the names and full tensors of a checkpoint, in the order of `metadata`.

    Every iteration reads the weights anew: a step of an optimizer is seen by the next one. `plan` says what is written.
    """

    def __init__(
        self, context: ConversionContext, model: MemorySource | MegatronSource, files: Mapping[str, bytes],
        config: dict[str, Any], memory: int,
    ) -> None:  # fmt: skip
        self.plan: Plan = context.plan
        self.config = config
        """`quantization_config` of config.json, for the first start of the server; {} without quantization."""
        self.files = files
        """config.json and the files beside it, by name: with these a server starts with weights of its own."""
        self._context, self._model = context, model
        groups, self._rounds = Groups(context.plan), 0
        self._encoder = (
            ShardedEncoder(context, model, groups, memory)
            if isinstance(model, SharedSource)
            else Encoder(context, groups, memory)
        )

    @cached_property
    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor in the order of an iteration; reads no weight, and is the same on every rank."""
        if isinstance(self._encoder, Encoder):
            return tuple(_meta(output.spec) for output in self.plan.outputs)
        return tuple(_meta_of_part(part, output) for part in self._encoder.parts for output in part.step.outputs)

    @property
    def received(self) -> int:
        """Bytes of weights and codes that this rank got from the others so far."""
        return self._model.ranks.received if isinstance(self._model, SharedSource) else 0

    def __repr__(self) -> str:
        nbytes = size(sum(one.nbytes for one in self.metadata))
        where = self.plan.program or self.plan.target
        return f"<bridge.tensors: {self.plan.scheme} for {where}, {len(self)} tensors, {nbytes}>"

    def __len__(self) -> int:
        return len(self.metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, on the model's device; each has memory of its own.

        If ranks share the model, all of them iterate to the end.
        """
        self._begin()
        return self._tensors(self._encoder.run())

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank has of each tensor, as `metadata` says; all if the model is whole on every rank."""
        self._begin()
        return self._tensors(self._encoder.run() if isinstance(self._encoder, Encoder) else self._encoder.run(True))

    def _begin(self) -> None:
        """Renew the model's tensors, on all ranks or on none."""
        what = f"iteration {self._rounds + 1}"
        self._rounds += 1
        ranks = self._model.ranks if isinstance(self._model, SharedSource) else None
        try:
            self._model.renew()
        except SourceError as error:
            changed = LiveError(str(error))
            if ranks is None:
                raise changed from error
            ranks.fail(changed, what)
        if ranks is not None:
            ranks.agree({"plan": self.plan.digest, "number of iterations": self._rounds}, what)
        check_ties(self._context)

    def _tensors(self, steps: Iterator[tuple[Step, list[torch.Tensor]]]) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        device = self._model.device
        for step, made in steps:
            for output in step.outputs:
                meta = _meta(output.spec)
                yield meta.name, made.pop(0).view(getattr(torch, meta.dtype)).reshape(meta.shape).to(device)

    def digest(self) -> str:
        """SHA-256 of the tensors as they are now: one pass. `bridge.live.digest` gives the same of a directory."""
        whole = Digest()
        for meta, (_, tensor) in zip(self.metadata, self, strict=True):
            whole.add(meta.name, meta.dtype, meta.shape, [_memory(tensor)])
        return whole.hexdigest()


def _meta(spec: TensorSpec) -> TensorMeta:
    return TensorMeta(spec.name, "uint8" if DTYPES[spec.dtype].bits == 4 else spec.dtype, stored_shape(spec))


def _meta_of_part(part: Part, output: Output) -> TensorMeta:
    plain = _meta(output.spec)
    if part.place is not Place.OWN or not part.alone:
        return plain
    if part.owner is not None and not part.like_shards:
        return replace(plain, owner=part.owner)
    return replace(plain, sharded=not is_constant(part.step, output))


def _memory(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
