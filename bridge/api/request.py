"""Resolve a request from its arguments and the model's headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.api.plans import need_of, passthrough_of, plan_of, planned_hints, scheme_of
from bridge.calibration.data import DEFAULT, Data, Sampling, check_compute, prepare
from bridge.core.addresses import check_local
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, UsageError, warn
from bridge.core.progress import Progress, no_progress
from bridge.core.remote.path import remote
from bridge.core.text import fold_problems, token_count
from bridge.core.values import Format, Structure, main_dtype
from bridge.core.version import install
from bridge.planning.memory import extent, stream_memory
from bridge.planning.passthrough import PassthroughScheme
from bridge.planning.plan import Layout, Plan
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration, of_expert
from bridge.quant.describe import chosen_words, explained, smoothed_words
from bridge.quant.schemes.load import check_name
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.checkpoint import as_stored
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.targets import load_target
from bridge.verification.parity import COSINE, KL

# Bytes of a calibration file with its held-out reference outputs: 4.2 MB for tiny-llama, which keeps all of them.
CALIBRATION_BYTES = 16 << 20
# Bytes of model card, page and settings; then of manifest, graph and report for each tensor (tiny-llama: 2.7 KB).
BASE_TEXT_BYTES, TENSOR_TEXT_BYTES = 256 << 10, 4 << 10


def data_of(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """Prepare data to calibrate with, and warn of what a user should know about them."""
    prepared = unwarned_data_of(source, data, sampling)
    warn_of(prepared)
    return prepared


def unwarned_data_of(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """The same without its warnings, which `warn_of` issues when it is known that they are used."""
    check_local(data=data)
    return prepare(data, source, sampling)


def warn_of(data: Data) -> None:
    """Issue the warnings on data."""
    for text in data.warnings:
        warn(text)


def tokens_of(evaluate: int | str | None) -> int | None:
    """The tokens to evaluate an output on; None takes the default."""
    return None if evaluate is None else token_count(evaluate, "evaluate= (--evaluate)")


def gate_of(gate: str | None) -> str:
    """UsageError for another gate than "cosine", "kl=0.1", or None for the bounds of KL of schemes."""
    if gate in (None, COSINE):
        return gate or ""
    with suppress(ValueError, AttributeError):
        if gate and gate.startswith(KL) and 0 < float(gate.removeprefix(KL)) < math.inf:
            return gate
    raise UsageError(
        f"gate={gate!r} (--gate) is unknown; known: {COSINE}, and {KL}0.1, the most nats a token; without it, language "
        "models go by what was measured of their scheme"
    )


def data_to_compare(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """Prepare data that only serve the comparison of outputs.

    What the model lacks for the embedded text, the data that None stands for, is kept in `missing`.
    """
    if data is not None:
        return data_of(source, data, sampling)
    if not source.can_run:
        return Data(missing=f"{source.where}: cannot be run here: {install('trt')}")
    try:
        return prepare(None, source, sampling)
    except UsageError:
        raise
    except BridgeError as error:
        return Data(missing=str(error))


@dataclass(frozen=True)
class Request:
    """The arguments of `convert`, with the same names and defaults."""

    model: Any
    """A directory, a hub id, an address, a `transformers` model in memory, or a `Source`."""
    target: str
    """The format to write, "hf" or "trt", or a program that stands for one, "vllm"."""
    quant: Any = None
    """A scheme name, "fp8", a recipe's path, a `Scheme`, or "auto:4.8bits"; "none" dequantizes a quantized source."""
    out: str | Path | None = None
    """The directory to write, or its address, "s3://models/llama-fp8"; None names it `llama-fp8-hf`."""
    calib: Any = None
    """A `Calibration`, the path of a saved one, "fp8.safetensors", or what `data` takes."""
    data: Any = None
    """What to calibrate with and compare on: "corpus.jsonl", texts, batches; None takes the embedded text."""
    sampling: Sampling = DEFAULT
    """How much of it: `Sampling(samples=128, sequence=512, field="text")`."""
    kv: str | None = None
    """The numeric of the KV cache, "fp8" or "nvfp4_cast"; None leaves it unquantized."""
    group: int | None = None
    """Values in a block of integer weights: 32, 64 or 128; None takes the scheme's."""
    zero_points: bool = False
    """Whether each block of INT4 weights has a zero point."""
    gate: str = ""
    """"cosine" judges language models by cosine and norm of their logits; "" by KL."""
    device: str | None = None
    """Where calibration runs, "cuda:1"; None leaves the model where it is."""
    config: Mapping[str, Any] | str | Path | None = None
    """Entries that replace those of config.json: `{"rope_theta": 500000.0}`, or a JSON file of them."""
    tokenizer: Any = None
    """An object, a directory or a hub id, in place of the model's own tokenizer."""
    verify: bool = True
    """Whether the output is read again and compared with its source, and run if the target does."""
    overwrite: bool = False
    """Whether `out` is replaced, if bridge wrote it."""
    resume: bool = True
    """Whether an unfinished run of the same conversion is continued, else what it left is discarded."""
    progress: Progress = no_progress
    """Called with the work done, the total and the stage: `progress(3, 83, "weights")`."""
    memory: int | None = None
    """Bytes that the run may use, 24 * 10**9; None takes the plan's figure."""
    runtime: str | None = None
    """The program that will load the output, "sglang"; it chooses options of the target."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the target that the caller gave: `{"shard_size": "5GB"}`."""
    compute: str | None = None
    """What calibration runs in: "fp32", or None for the model's dtype."""
    base: Any = None
    """The model under a LoRA adapter; None takes the one that its adapter_config.json names."""
    candidates: Any = None
    """The rules that a name such as "int4:best" chooses from, "gptq,imatrix"; None for all."""
    adapter: str | None = None
    """What becomes of a LoRA adapter: "merge", as None, adds it to its base, and "keep" writes it too."""

    rotate: str | None = None
    """The rotation that is folded into the weights, "hadamard"; None leaves them as they are."""

    def source(self) -> Source:
        """Open the model, if the scheme's name is known."""
        check_name(self.quant)
        opened = open_source(self.model, self.config, self.tokenizer, self.base, self.adapter)
        return rotated(opened, self.rotate)


@dataclass(frozen=True)
class ResolvedRequest:
    """A planned conversion: its output lies outside its source, and its memory is enough for the stream."""

    request: Request
    """The arguments, with the scheme that `auto:` chose and a local output in their places."""
    source: Source
    """The opened model; of an adapter or a quantized checkpoint, the one that wraps its files."""
    structure: Structure
    """Its roles and sites: `model.layers.0.mlp.down_proj` is a matrix of role `mlp.down.weight`."""
    scheme: Scheme | None
    """The scheme with rules bound to this model; None writes the model's own dtype."""
    plan: Plan
    """Every output tensor and the step that writes it."""
    out: Path
    """The directory to write: `llama-fp8-hf` if none was named."""
    calibration: Calibration | None
    """Given by the caller, or saved by a source that was quantized in training; None if there is none yet."""
    memory: int
    """Bytes that the stream may use at once, 512 << 20."""

    @property
    def disk(self) -> int:
        """Bytes on disk at most."""
        calibrated = self.uncalibrated or self.calibration is not None
        texts = BASE_TEXT_BYTES + TENSOR_TEXT_BYTES * len(self.plan.outputs)
        chosen = codes_bytes(self.plan) * (2 if self.uncalibrated else 1)  # also in a file while blocks are calibrated
        return self.plan.disk + texts + (CALIBRATION_BYTES + chosen) * calibrated

    @property
    def uncalibrated(self) -> bool:
        """True if the scheme needs statistics that nobody gave: the model must be run."""
        return self.scheme is not None and self.scheme.needs_calibration and self.calibration is None

    @property
    def needs_modelopt(self) -> bool:
        """Whether that run takes ModelOpt."""
        return self.scheme is not None and self.scheme.needs_modelopt


def codes_bytes(plan_: Plan) -> int:
    """Bytes of the codes and scales that calibration chooses for a plan's weights: 4 bits, and 8 for a block of 16."""
    total = 0
    for step in plan_.quantized:
        values = sum(plan_.sources[part.source].size for part in step.inputs if part.source)
        total += values // 2 if step.format and step.format.compensated else 0
        total += values // 16 if step.format and step.format.rescaled else 0
    return total


def resolve(source: Source, request: Request) -> ResolvedRequest:
    """Resolve what `convert` would do, from its arguments and the headers of the source."""
    check_local(calib=request.calib)
    check_compute(request.compute)
    if request.calib is not None and request.data is not None:
        raise UsageError("calib= (--calib) and data= (--data) both say what to calibrate with; give one of them")
    structure = structure_of(source)
    scheme = scheme_of(
        request.quant, request.kv, structure, source, (request.group, request.zero_points)
    ) or passthrough_of(request.quant, source)
    source = as_stored(source) if isinstance(scheme, PassthroughScheme) else source
    given = request.target, (request.quant, request.kv), dict(request.options), request.runtime
    with planned_hints(source, structure, *given):
        plan_ = plan_of(source, structure, request.target, scheme, dict(request.options), request.runtime)
    if scheme and plan_.calibration and request.sampling != DEFAULT:
        plan_ = replace(plan_, calibration=need_of(source, structure, scheme, request.sampling).line())
    name = f"{source.name}-{plan_.scheme}-{plan_.target}"
    directory = Path(name if request.out is None else request.out)
    _check_outside(directory, source)
    budget = stream_memory(plan_, request.memory)
    if check := getattr(load_target(plan_.target), "check_machine", None):  # targets of third parties may lack it
        check(plan_, request.memory)
    calibration = given_calibration(request.calib, request.data is not None, source, structure, plan_, scheme)
    return ResolvedRequest(request, source, structure, scheme, plan_, directory, calibration, budget)


def choose_dtype(resolved: ResolvedRequest) -> ResolvedRequest:
    """Plan bfloat16 where float16, which nobody asked for, holds a value of a float32 source as infinity.

    An engine and TensorRT for RTX are given float16. Reads the tensors that stay unquantized.
    """
    from bridge.streaming.encode import OVERFLOW
    from bridge.verification.finite import first_beyond

    if not _float16_is_chosen(resolved):
        return resolved
    request, plan_, source = resolved.request, resolved.plan, resolved.source
    plain = [part.source for step in plan_.steps if not step.format for part in step.inputs if part.source]
    tensor = first_beyond(source, plain, OVERFLOW["float16"])
    why = f"{tensor} has values" if tensor else input_beyond_float16(resolved, resolved.calibration)
    if not why:
        return resolved
    try:
        planned = resolve(source, replace(request, options={**request.options, "dtype": "bf16"}))
    except BridgeError as error:
        raise SchemeError(f"{why} that float16 does not hold, and bfloat16 is refused:\n  {error}") from error
    note = f"{why} that float16 does not hold: bfloat16 (--dtype)"
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, note)))


def _float16_is_chosen(resolved: ResolvedRequest) -> bool:
    """Whether a float32 source is written as float16 although no dtype was asked for."""
    asked = resolved.request.options.get("dtype") is not None
    dtypes = (main_dtype(resolved.source.specs.values()), resolved.plan.options.get("dtype"))
    return not asked and dtypes == ("float32", "float16")


def input_beyond_float16(resolved: ResolvedRequest, calibration: Calibration | None) -> str:
    """The first module whose calibrated input leaves the float16 that was chosen, in words; "" if none does."""
    from bridge.streaming.encode import OVERFLOW

    if calibration is None or not _float16_is_chosen(resolved):
        return ""
    beyond = (name for name, amax in calibration.input_amax.items() if float(amax) >= OVERFLOW["float16"])
    name = next(beyond, "")
    return f"the input of {name} reaches values" if name else ""


def _check_outside(out: Path, source: Source) -> None:
    """Refuse to overwrite the source."""
    root = source.root
    if root is not None and not remote(root) and Path(root).resolve() in (out.resolve(), *out.resolve().parents):
        raise UsageError(f"{out} is the source or lies inside it: its files would be lost; choose another directory")


def given_calibration(
    calib: Any, own_data: bool, source: Source, structure: Structure, plan_: Plan, scheme: Scheme | None
) -> Calibration | None:
    """The `Calibration`, loaded if `calib` is a path; checked to hold every statistic that the plan needs.

    `own_data`: the caller gave data to calibrate with, which go before statistics that the source has.
    """
    if isinstance(calib, str | Path) and str(calib).endswith(".safetensors"):
        calib = Calibration.load(Path(calib))
    elif isinstance(calib, str | Path) and str(calib).endswith((".gguf", ".dat")):
        calib = _importance_of(Path(calib), plan_, scheme)
    from_source = calib is None and not own_data and scheme is not None and scheme.needs_calibration
    calib = source.calibration if from_source else calib  # statistics that quantized training saved
    if not isinstance(calib, Calibration):
        return None
    if scheme is None:
        raise UsageError("a calibration was given, but no scheme; pass quant=")
    formats: dict[str, Format | str] = {m: s.format for s in plan_.quantized if s.format for m in s.modules}
    attention = [step.attention for step in plan_.steps if step.attention]
    if from_source and calib.missing(formats, attention, scheme.kv):
        return None
    from bridge.calibration.modelopt import fingerprint

    if (before := calib.provenance.rotation) != source.rotation:
        raise CalibrationError(
            f"the calibration was made for weights with {rotation_words(before)}, and this conversion has "
            f"{rotation_words(source.rotation)}; calibrate with the same rotate= (--rotate)"
        )
    if (made_for := calib.provenance.model) and made_for != fingerprint(structure, source):
        raise CalibrationError(
            f"the calibration was made for another model ({calib.provenance.architecture}): tensors of {source.where} "
            "differ in name, shape or dtype; calibrate this model"
        )
    calib.require(formats, attention, scheme.kv)
    calib.check()
    _check_smoothing(calib, plan_, scheme)
    _check_lengths(calib, plan_)
    _check_codes(calib, plan_, source, structure)
    if calib.input_square and not any(format_.watched for format_ in scheme.formats):
        warn(f"calib= (--calib) has an importance matrix, and scheme {scheme.name} uses none; q4_k_imatrix does")
    return calib


def rotation_words(rotation: str) -> str:
    """A rotation in a sentence."""
    return f"rotation {rotation}" if rotation else "no rotation"


def _importance_of(path: Path, plan_: Plan, scheme: Scheme | None) -> Calibration:
    """The importance matrix in a file of llama.cpp's, whose names are those of target `gguf`."""
    from bridge.targets.gguf.imatrix import read_imatrix

    if plan_.target != "gguf" or scheme is None or not any(format_.weighted for format_ in scheme.formats):
        raise UsageError(
            f"calib={str(path)!r} (--calib): schemes such as q4_k_imatrix of target gguf use an importance matrix of "
            f"llama.cpp, not {plan_.scheme} of {plan_.target}"
        )
    return read_imatrix(path, plan_, scheme)


def _check_codes(calib: Calibration, plan_: Plan, source: Source, structure: Structure) -> None:
    """CalibrationError if the codes or scales that a plan takes were chosen for other weights."""
    formats = {step.format for step in plan_.quantized if step.format and step.format.chosen}
    if not formats:
        return
    made = calib.provenance.codes.split(", ")
    if calib.provenance.codes and (other := [one for form in formats if (one := chosen_words([form])) not in made]):
        raise CalibrationError(
            f"the calibration is for {calib.provenance.codes}, and scheme {plan_.scheme} needs {other[0]}; "
            f"calibrate for this scheme: quant={plan_.scheme!r} (--quant {plan_.scheme})"
        )
    from bridge.calibration.algorithms.codes import digest_of_weights  # loads the kernels

    if calib.provenance.weights != digest_of_weights(source, structure, calib.chosen):
        raise CalibrationError(
            f"the calibration was made for other weights than those of {source.where}; calibrate this model"
        )


def _check_smoothing(calib: Calibration, plan_: Plan, scheme: Scheme) -> None:
    """CalibrationError if AWQ searched its pre-scales for other codes than the plan's.

    Older calibrations do not say for which: they serve blocks that nobody asked for by size or zero points.
    """
    made, digest = calib.provenance.smoothed, calib.provenance.scheme_digest
    wanted = {words for s in plan_.quantized if s.format and (words := smoothed_words([s.format]))}
    asked = scheme.sized or any(numeric.zero_points for form in scheme.formats for numeric in form.weight)
    if not made and (not asked or digest in ("", scheme.digest)):
        return
    if other := sorted(wanted - {*made.split(", ")}):
        of = (
            " and ".join(map(explained, made.split(", "))) if made else f"{calib.provenance.scheme} as it is by default"
        )
        raise CalibrationError(
            f"the pre-scales of the calibration were searched by AWQ for {of}, and scheme {plan_.scheme} takes "
            f"{explained(other[0])}; calibrate with the same group= (--group) and zero_points= (--zero-points)"
        )


def _check_lengths(calib: Calibration, plan_: Plan) -> None:
    """CalibrationError if an importance matrix or clips are of another shape than a weight."""
    wrong = {}
    parts = [(step, part) for step in plan_.quantized for part in step.inputs if step.site and part.source]
    for step, part in parts:
        assert step.site and step.format
        module = part.module or step.site.module
        if step.format.clipped or step.format.learned:
            shape, block = plan_.sources[part.source].shape, step.format.weight[0].block[-1]
            out, in_ = shape[::-1] if step.site.layout == "in_out" else shape
            clip = (calib.scale_factor if step.format.learned else calib.weight_clip)[module]
            if (clips := clip.shape) != (grid := (out, -(-in_ // block))):
                wrong[module] = f"clips of blocks {clips}, and the weight has {grid}"
        if step.format.weighted:
            whole = replace(part, rows=None) if part.transposed else replace(part, cols=None)
            (_, inputs), number = extent(whole, plan_.sources), part.expert
            if step.layout is Layout.EXPERTS:  # [experts, in, out]
                inputs, number = plan_.sources[part.source].shape[1], 0
            have = len(calib.input_square[of_expert(module, number)])
            if have != inputs:
                wrong[module] = f"importance of {have} inputs, and the weight has {inputs}"
    if wrong:
        lines = fold_problems(list(wrong.items()))
        raise CalibrationError("\n  ".join(["the calibration is not of this model", *lines]))
