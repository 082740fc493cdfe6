"""One rank of a trainer: arguments rank, ranks, work directory; a case a line of standard input, a reply a line."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

import bridge
from bridge.quant.codec import on_device
from bridge.workflows.live import encoding
from tests.models.decoder_families import build
from tests.workflows.live.families import FIELDS

torch.set_num_threads(1)
RANK, RANKS, WORK = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
TIMEOUT = 8.0  # seconds
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer(family: str, dtype: str = "bfloat16", **fields: Any) -> tuple[Any, Any]:
    """The whole model, and the same one in shards."""
    plain, model = (build(family, DTYPES[dtype], **FIELDS[family] | fields) for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer)
    return plain, fully_shard(model)


def step(*models: Any) -> None:
    """Change all weights in place, in the same way on all ranks."""
    for model in models:
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.mul_(1.0 + len(name) / 300)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def equal(family: str, scheme: str | None, **options: Any) -> dict[str, Any]:
    """Two iterations, each beside the whole model; and what passed between ranks in one of them."""
    plain, model = trainer(family, options.pop("dtype", "bfloat16"), **options.pop("fields", {}))
    source = bridge.tensors(model, "vllm", scheme, timeout=60.0, **options)
    whole = bridge.tensors(plain, "vllm", scheme, **options)
    assert source.plan.digest == whole.plan.digest and source.config == whole.config
    differing, received = [], []
    for _ in range(2):
        step(plain, model)
        before = source.received
        for (name, tensor), (other, wanted) in zip(source, whole, strict=True):
            assert name == other and tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
            differing += [] if torch.equal(bits(tensor), bits(wanted)) else [name]
        received.append(source.received - before)
    places = {str(part.place) for part in source._encoder.parts}  # type: ignore[union-attr]
    made = sum(meta.nbytes for meta in source.metadata)
    return {"differing": differing, "received": received, "made": made, "places": [*places]}


def there(**named: Any) -> dict[str, Any]:
    """`equal`, by plain torch where a GPU's tensors are; and how many steps the host took of the sharded model."""
    best, plain, hosted = on_device.best_way, encoding.write_step, list[str]()
    source_kinds = {"ShardedSource", "OwnRows"}

    def counted(step: Any, context: Any, *rest: Any) -> Any:
        hosted.extend([step.outputs[0].spec.name] if type(context.source).__name__ in source_kinds else [])
        return plain(step, context, *rest)

    on_device.best_way, encoding.write_step = (lambda tensor: on_device.TORCH), counted
    try:
        return equal(**named) | {"hosted": hosted}
    finally:
        on_device.best_way, encoding.write_step = best, plain


def local(family: str, scheme: str | None, **fields: Any) -> dict[str, Any]:
    """What each rank yields by itself, joined by `metadata` alone."""
    plain, model = trainer(family, **fields)
    source, whole = bridge.tensors(model, "vllm", scheme), dict(bridge.tensors(plain, "vllm", scheme))
    before = source.received
    mine, differing = dict(source.local()), []
    received = source.received - before
    for meta in source.metadata:
        wanted = whole[meta.name]
        if meta.owner is not None:
            wanted = wanted if meta.owner == RANK else None  # type: ignore[assignment]
        elif meta.sharded:
            chunks = wanted.chunk(RANKS)
            wanted = chunks[RANK] if len(chunks) > RANK else wanted[:0]
        own = mine.pop(meta.name, None)
        if wanted is None or not wanted.numel():
            differing += [] if own is None else [meta.name]
        elif own is None or not torch.equal(bits(own), bits(wanted)):
            differing.append(meta.name)
    sharded = sum(meta.sharded for meta in source.metadata)
    owned = sum(meta.owner is not None for meta in source.metadata)
    return {"differing": [*differing, *mine], "received": received, "sharded": sharded, "owned": owned}


def failing(kind: str) -> dict[str, Any]:
    """One rank does something else; every rank says what it was told."""
    _, model = trainer("LlamaForCausalLM")
    start = time.monotonic()
    try:
        if kind == "other-scheme":
            bridge.tensors(model, "vllm", "fp8_pc_pt" if RANK else "int8_pc_pt", timeout=TIMEOUT)
        if kind == "refused":
            bridge.tensors(model, "vllm", "fp8_pc_pt", memory="1MB" if RANK else None, timeout=TIMEOUT)
        scheme = "nvfp4_wo" if kind == "nan-under-one-scale" else "fp8_pc_pt"
        source = bridge.tensors(model, "vllm", scheme, timeout=TIMEOUT)
        if kind == "memory" and RANK == 1:
            source._encoder._encode = exhausted  # type: ignore[method-assign, assignment]
        if kind.startswith("nan") and RANK == 1:
            model.model.layers[1].mlp.up_proj.weight.to_local().detach()[0, 5] = float("nan")
        if kind == "reshaped" and RANK == 1:
            source._model._model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
        if kind == "late" and RANK == 1:
            time.sleep(TIMEOUT + 4)
        if kind == "ahead":
            for _ in source if RANK else ():
                break
        source.digest()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "text": "", "seconds": time.monotonic() - start}


def exhausted(*_: Any) -> Any:
    raise RuntimeError("CUDA out of memory")


def not_shared(last: bool) -> dict[str, Any]:
    """A tensor that every rank has whole is not finite on rank 1; `last`: no tensor that ranks share follows it."""
    _, model = trainer("DeepseekV3ForCausalLM")
    source = bridge.tensors(model, "vllm", "int8_wo", timeout=TIMEOUT)
    encoder: Any = source._encoder
    if last:
        encoder._parts.sort(key=lambda part: part.place == "here")
    if RANK == 1:
        next(tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias"))[1] = float(
            "nan"
        )
    start = time.monotonic()
    try:
        seen = [name == meta.name for (name, _), meta in zip(source, source.metadata, strict=True)]
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "text": "", "seen": seen}


def held() -> dict[str, Any]:
    """What meetings hold, beside what is counted for them; and the bytes that reading one tensor twice takes."""
    plain, model = trainer("Qwen3MoeForCausalLM")
    least = []
    for one in (plain, model):
        try:
            bridge.tensors(one, "vllm", "fp8_block_dynamic", memory=1)
        except Exception as error:
            least.append(int(str(error).split()[-2]))
    source = bridge.tensors(model, "vllm", "fp8_block_dynamic")
    model_source: Any = source._model
    gather, meetings = model_source.ranks.gather, [0]

    def gathered(mine: Any, sizes: Any, *rest: Any) -> Any:
        meetings.append(mine.nbytes + (max(sizes) + 1) * (RANKS if sum(map(bool, sizes)) > 1 else 1))
        return gather(mine, sizes, *rest)

    model_source.ranks.gather = gathered
    source.digest()
    freed = model_source._last_whole == ("", None)
    model_source._state["plain"] = torch.zeros(3)
    name = next(one for one in model_source._state if one.endswith("experts.down_proj"))
    before, _ = len(meetings), [model_source._whole(one) for one in (name, "plain", name)]
    return {"counted": least[1] - least[0], "held": max(meetings), "freed": freed, "again": len(meetings) - before}


def dead() -> dict[str, Any]:
    """Rank 1 dies during an iteration."""
    _, model = trainer("LlamaForCausalLM")
    source = bridge.tensors(model, "vllm", "fp8_pc_pt", timeout=TIMEOUT)
    seen = 0
    try:
        for _ in source:
            seen += 1
            if RANK == 1 and seen == 5:
                os._exit(7)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seen": seen}
    return {"error": ""}


CASES: dict[str, Any] = {
    "equal": equal,
    "there": there,
    "local": local,
    "failing": failing,
    "dead": dead,
    "held": held,
    "not_shared": not_shared,
}


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    distributed.init_process_group("gloo", init_method=f"file://{WORK}/store", rank=RANK, world_size=RANKS)
    for line in sys.stdin:
        case, named = json.loads(line)
        try:
            reply = CASES[case](**named)
        except Exception:
            reply = {"trace": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")
    os._exit(0)  # a group that lost a rank would wait for it


if __name__ == "__main__":
    main()
