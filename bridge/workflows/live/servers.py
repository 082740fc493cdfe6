"""Tensors as vLLM and SGLang take them from a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError
from bridge.core.text import byte_count
from bridge.workflows.live.tensors import Tensors

if TYPE_CHECKING:
    import torch

    Named = list[tuple[str, torch.Tensor]]


def vllm(source: Tensors) -> Any:
    """vLLM's `WeightSource`: give it to `TrainerWeightTransferEngine.trainer_init` on every rank of the trainer.

    >>> bridge.live.vllm(source).metadata[0].name  # doctest: +SKIP
    'model.embed_tokens.weight'
    """
    import torch

    try:
        from vllm.distributed.weight_transfer import base
    except ImportError as error:
        raise UsageError(
            f"bridge.live.vllm: vLLM cannot be imported here ({error}); install it beside the trainer, which needs its "
            "weight_transfer engines too"
        ) from error

    class VllmSource(base.WeightSource):  # type: ignore[misc]  # mypy does not follow vLLM
        """Every rank yields every tensor, so rank 0, which sends them, has all."""

        @cached_property
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(one.name, getattr(torch, one.dtype), one.shape) for one in source.metadata]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source)

    return VllmSource()


@dataclass(frozen=True)
class Bucket:
    """Some tensors that SGLang takes in one call."""

    tensors: Named
    """Names and tensors, those with wide dtypes first, so that each begins at a multiple of its own element."""

    def names(self) -> dict[str, list[Any]]:
        """`names`, `dtypes` and `shapes` of a request `update_weights_from_distributed`."""
        return {
            "names": [name for name, _ in self.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.tensors],
            "shapes": [list(tensor.shape) for _, tensor in self.tensors],
        }

    def flattened(self) -> dict[str, Any]:
        """What `update_weights_from_tensor` takes, serialized, with `load_format="flattened_bucket"`."""
        try:
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
        except ImportError as error:
            raise UsageError(
                f"bridge.live.sglang: SGLang cannot be imported here ({error}); install it beside the trainer"
            ) from error
        bucket = FlattenedTensorBucket(named_tensors=self.tensors)
        return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def sglang(source: Tensors, bucket: int | str = "512MB") -> Iterator[Bucket]:
    """Yield the tensors in buckets of at most so many bytes; a tensor that is larger has a bucket of its own.

    >>> for bucket in bridge.live.sglang(source):  # doctest: +SKIP
    ...     engine.update_weights_from_tensor([serialize(bucket.flattened())], load_format="flattened_bucket")
    """
    most = byte_count(bucket, "bucket=")

    def buckets() -> Iterator[Bucket]:
        held: Named = []
        nbytes = 0
        for name, tensor in source:
            if held and nbytes + tensor.nbytes > most:
                yield _sorted(held)
                held, nbytes = [], 0
            held.append((name, tensor))
            nbytes += tensor.nbytes
        if held:
            yield _sorted(held)

    return buckets()


def _sorted(tensors: Named) -> Bucket:
    return Bucket(sorted(tensors, key=lambda one: -one[1].element_size()))
