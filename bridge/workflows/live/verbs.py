"""Plan the tensors that a server loads of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, Unpack

from bridge.api.advice import loaded_by, recommended
from bridge.api.plans import plan_of, scheme_of
from bridge.api.request import Request, ResolvedRequest, resolve
from bridge.api.sensitivity.budget import is_automatic
from bridge.api.words import KvName, SchemeName, TargetName, TargetOptions
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, SourceError, UsageError
from bridge.core.text import byte_count, named, size
from bridge.planning.contract_files import load_runtime
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import layout_of, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.adapted.opening import is_peft_model
from bridge.sources.memory import MemorySource
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.targets.hf import TARGET
from bridge.workflows.live.encoding import bytes_of, context_of
from bridge.workflows.live.megatron import MegatronSource, boxes_of, models_of, open_megatron, own_parts
from bridge.workflows.live.parts import held_by_meetings, parts_of
from bridge.workflows.live.ranks import Ranks
from bridge.workflows.live.sharded import SharedSource, is_sharded, open_sharded
from bridge.workflows.live.tensors import Tensors

T = TypeVar("T")
SHOWN = 6  # schemes that a refusal names
WHERE = "bridge.tensors"  # of ranks that plan
HELD = 1 << 30  # bytes that are held at a time, unless one step needs more


def tensors(
    model: Any,
    target: TargetName | str = "vllm",
    quant: SchemeName | str | Path | Scheme | None = None,
    *,
    calib: Calibration | str | Path | None = None,
    kv: KvName | str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    memory: int | str | None = None,
    timeout: float = 600.0,
    **options: Unpack[TargetOptions],
) -> Tensors:
    """Plan the tensors that a server loads of a model in training; iterate over the result after every step.

    They are, byte for byte, those that `convert` would write at that moment. Reads no weight and changes nothing in the
    model.

    Args:
        model: a `transformers` model in memory. Its wrappers (FSDP2, torch.compile, activation checkpointing) may stay.
            If ranks hold parts of it, all ranks of the default process group call this, and iterate. Or a GPTModel of
            Megatron-Core, or `[chunk, ...]` of a stage, by tensor, pipeline and expert ranks.
        target: the program that receives them, "vllm" or "sglang"; or "hf", with any of its options.
        quant: a scheme that needs no data, "fp8_block", or one whose calibration is given; None hands over plain
            weights.
        calib: a `Calibration`, or the path of a saved one. It stays what it is while the weights change.
        kv: the numeric of the KV cache; "fp8_cast" needs no calibration.
        config: entries that replace those of the model's config, as `convert` takes them.
        memory: bytes, or "512MB", that encoding and tensors not yet taken may hold; None takes 1 GiB, or what the
            largest tensor needs; on ranks, what their exchange takes on top.
        timeout: seconds that a rank waits for the others.

    Raises:
        BridgeError: UsageError, SourceError, SchemeError, PlanError or CalibrationError, before a weight is read. On
            several ranks all raise the error of one; LiveError if a rank does not come, or has another model.

    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("examples/models/tiny-llama")
    >>> source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    >>> len(dict(source)), source.config["quant_algo"]
    (83, 'FP8_PER_CHANNEL_PER_TOKEN')
    """

    def planned(source: Source) -> Tensors:
        resolved = resolve(source, Request(source, target, quant, calib=calib, kv=kv, options=dict(options)))
        return _tensors(resolved, target, memory)

    _check_words(model, quant)
    chunks = models_of(model)
    if not chunks and not is_sharded(model):
        return planned(open_source(model, config))
    ranks = Ranks(timeout)
    parts = _told(lambda: own_parts(chunks), ranks) if chunks else []
    everyone = ranks.everyone(boxes_of(parts), WHERE) if chunks else []

    def opened() -> Source:
        return open_megatron(chunks, config, parts, everyone, ranks) if chunks else open_sharded(model, config, ranks)

    made = _told(lambda: planned(opened()), ranks)
    ranks.agree({"plan": made.plan.digest}, WHERE)
    return made


def _told(run: Callable[[], T], ranks: Ranks) -> T:
    """What `run` returns; an error of it is raised on all ranks, at their next meeting."""
    try:
        return run()
    except Exception as error:
        ranks.fail(error, WHERE)


def _tensors(resolved: ResolvedRequest, target: str, memory: int | str | None) -> Tensors:
    source = resolved.source
    if not isinstance(source, MemorySource | MegatronSource):
        raise UsageError(
            f"{source.where}: not a transformers model in memory, nor a GPTModel beside torch.distributed; "
            "`convert` writes other models to files"
        )
    if resolved.plan.target != "hf":
        raise UsageError(
            f"target {target!r}: writes no checkpoint that a server loads tensor by tensor; use vllm, sglang or hf"
        )
    if any(step.format.chosen for step in resolved.plan.quantized if step.format):
        raise SchemeError(
            f"quant={resolved.plan.scheme!r}: its codes are chosen for the weights that calibrated, and a trainer "
            "changes them; use a scheme that codes weights as they are, such as int4:rtn, int4:imatrix or nvfp4_wo:mse"
        )
    if resolved.uncalibrated:
        raise CalibrationError(_needs_data(resolved, target))
    context = context_of(resolved.plan, source, resolved.calibration, resolved.scheme)
    files = TARGET.files(resolved.plan, source)
    settings = json.loads(files["config.json"]).get("quantization_config", {})
    return Tensors(context, source, files, settings, _held(memory, resolved.plan, source))


def _check_words(model: Any, quant: Any) -> None:
    if is_peft_model(model):
        raise SourceError(
            f"{type(model).__name__} in memory: its adapter is not merged, and a server would get the base alone; give "
            "model.merge_and_unload(), or let the server load the adapter itself"
        )
    if is_automatic(quant) or layout_of(quant) is not None:
        verb, made = ("sensitivity", "makes a recipe") if is_automatic(quant) else ("calibrate", "chooses a rule")
        raise UsageError(
            f"quant={quant!r} measures the model first: `qbridge {verb}` {made}; or name one, 'int4:rtn' for example"
        )
    chunks = model if isinstance(model, list | tuple) else [model]
    parameters = (pair for chunk in chunks if hasattr(chunk, "named_parameters") for pair in chunk.named_parameters())
    if empty := [name for name, parameter in parameters if getattr(parameter, "is_meta", False)]:
        raise SourceError(
            f"{type(model).__name__} in memory: {named(empty)}: on the meta device, without values; call "
            "model.to_empty(device=...) and load a checkpoint, with bridge.load(model, ...) for example"
        )


def _held(memory: int | str | None, plan: Plan, source: Source) -> int:
    """The bytes that may be held; UsageError if the largest step, and the meetings of ranks, need more."""
    largest = max(plan.steps, key=lambda step: bytes_of(step, plan))
    meetings = held_by_meetings(parts_of(plan, source), source) if isinstance(source, SharedSource) else 0
    least = bytes_of(largest, plan) + meetings
    if memory is None:
        return max(HELD + meetings, least)
    if (given := byte_count(memory, "memory=")) < least:
        raise UsageError(
            f"memory={size(given)} is too little: {largest.outputs[0].spec.name} takes {size(least - meetings)}"
            f"{f', and what ranks exchange {size(meetings)}' if meetings else ''}; give at least "
            f"{least} bytes"
        )
    return given


def _needs_data(resolved: ResolvedRequest, target: str) -> str:
    """Why a scheme is refused, with those of the same server that need no data."""
    program = load_runtime(resolved.plan.program) if resolved.plan.program else None
    known = [*recommended(program), *(loaded_by(program) if program else scheme_names())]

    def fits(name: str) -> bool:
        if load_scheme(name).needs_calibration:
            return False
        try:
            scheme = scheme_of(name, None, resolved.structure, resolved.source)
            plan_of(resolved.source, resolved.structure, target, scheme, dict(resolved.request.options))
        except BridgeError:
            return False
        return True

    free = [*islice((name for name in dict.fromkeys(known) if layout_of(name) is None and fits(name)), SHOWN)]
    what = f"quant={resolved.plan.scheme!r}"
    what += f" with kv={resolved.request.kv!r}" if resolved.request.kv else ""
    others = f", or use a scheme that needs none: {', '.join(free)}" if free else "; every scheme that fits needs some"
    return (
        f"{what} needs statistics of activations, and no calibration was given; pass calib=bridge.calibrate(model, "
        f"{resolved.plan.scheme!r}){others}"
    )
