"""One cell of the sweep: a family through a target and a scheme, held to ModelOpt's export or to transformers."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import shutil
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import bridge
from bridge.core.errors import BridgeError, WriteError
from bridge.targets.onnx.files import is_multimodal
from bridge.targets.onnx.run.encoder_decoder import Arrays, EncoderDecoder
from bridge.targets.onnx.run.runtime import Runtime
from bridge.targets.trt.engine import parser_findings
from bridge.verification.outputs import relative_l2
from tests.oracles import export_oracle as oracle
from tests.oracles.modelopt_oracle import Answer, ask
from tests.sweep import seeing
from tests.sweep.build import build, feeds
from tests.sweep.decoded import distance, names, output_error, quantized

# target, scheme
CELLS: dict[str, tuple[str, str | None]] = {
    "hf fp8": ("hf", "fp8"),
    "hf int4_awq": ("hf", "int4_awq"),
    "hf nvfp4_wo": ("hf", "nvfp4_wo"),
    "trt": ("trt", None),
    "trt engine": ("trt", "int8_wo"),  # the one scheme that asks nothing of the widths of tiny models
}
ENGINE = "sm89,sm120"
ENDS = ("equal", "right", "built", "parsed", "differs", "refused", "wrong", "crashed")
STEPS = 8
WITHOUT = "cache=False"  # what a refusal says if there is a graph without a cache
ROUNDINGS = 4  # times the distance of transformers' float32 from its float64, where that is large
RAISES = "ModelOpt raises"
NOTHING = "no weight quantizer is enabled"  # of towers alone, which ModelOpt's presets keep as parts of models of text
FLOAT = 1e-4  # float32 sums in another order, blown up by two random layers


@dataclass(frozen=True)
class Ended:
    """How a cell ended.

    equal     every byte is ModelOpt's
    right     proved by our own verification, or equal to transformers' logits; `words`: what ModelOpt does instead.
              Where its values are others: our outputs are nearer to the float model's
    built     TensorRT for RTX made engines of the graphs, which nothing ran; `words`: what matrices compiled to
    parsed    its parser takes the graphs and its builder does not; `words`: what it says
    differs   proved, but values of tensors are others than ModelOpt's
    refused   with a message of ours, or by TensorRT's parser
    wrong     not proved, or other logits than transformers'
    crashed   with anything else
    """

    end: str
    words: str = ""


def run(family: str, cell: str, work: Path) -> Ended:
    """Convert the family in a directory that its cells share, and compare."""
    target, scheme = CELLS[cell]
    dtype = torch.float32 if target == "trt" else torch.bfloat16
    directory, out = work / f"source-{dtype}", work / cell
    if not directory.exists():
        oracle.save(build(family, dtype), directory)
    model = oracle.load(directory)
    if model.config.model_type == "whisper":
        _say_frames(directory, model.config)
    batches = [feeds(model, seed) for seed in range(3)]  # the last is held out
    if target == "trt" and (pixels := batches[0].get("pixel_values")) is not None and pixels.ndim > 3:
        say_size(directory, pixels)
    options: dict[str, Any] = {"own_scales": True, "dtype": "bf16"} if target == "hf" else {"verify": False}
    options |= {"dtype": "fp16"} if cell == "trt engine" else {}
    data = {"calib": batches} if scheme in ("fp8", "int4_awq") else {}

    def convert(**more: Any) -> Any:
        return bridge.convert(directory, target, scheme, out, progress=False, **data, **options, **more)

    apart = ""
    try:
        try:
            report = convert()
        except BridgeError as error:
            if WITHOUT not in str(error):
                raise
            report, apart = convert(cache=False), "without a cache: "
    except BridgeError as error:
        return Ended("refused", _shortened(str(error), work))
    except Exception as error:
        return Ended("crashed", _shortened(f"{type(error).__name__}: {error} ({_place(error)})", work))
    if target == "trt":
        ended = build_engines(out, work) if scheme else compare_logits(model, out)
        return replace(ended, words=apart + ended.words)
    assert scheme
    if not report.passed:
        failed = [one for one in (*report.parity.tensors, *report.parity.outputs) if not one.passed]
        if not report.findings and all(one.passed for one in report.parity.tensors):
            return _coarse(directory, scheme, batches, out, failed[0].why)
        return Ended("wrong", "; ".join([*report.findings, *(one.why for one in failed)])[:300])
    return compare_export(directory, scheme, batches, out, work / f"{cell}-theirs")


def build_engines(out: Path, work: Path) -> Ended:
    """Let TensorRT for RTX build engines of all graphs of a directory."""
    try:
        engines = bridge.engine(out, ENGINE, progress=False).engines
    except WriteError as error:
        return Ended("refused" if parser_findings(out) else "parsed", _shortened(str(error), work))
    return Ended("built", "; ".join(dict.fromkeys(engine.summary for engine in engines)))


def say_size(directory: Path, pixels: torch.Tensor) -> None:
    """Write the size of images as a checkpoint has it: the configs of convolutional models name none."""
    height, width = pixels.shape[-2:]
    (directory / "preprocessor_config.json").write_text(json.dumps({"size": {"height": height, "width": width}}))


def _say_frames(directory: Path, config: Any) -> None:
    """Write how a sound becomes frames, of which ModelOpt's exporter asks a checkpoint of Whisper for the number."""
    from transformers import WhisperFeatureExtractor

    rate, frames = 16_000, 2 * config.max_source_positions
    made = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1, hop_length=rate // frames)
    made.save_pretrained(directory)


def compare_export(directory: Path, scheme: str, batches: list[Any], ours: Path, theirs: Path) -> Ended:
    """Hold a checkpoint to the one that ModelOpt exports after a calibration of its own; the last batch is held out."""
    try:
        try:
            answer = _exported(directory, scheme, batches[:-1], theirs)
        except RuntimeError as error:
            if NOTHING not in str(error):
                raise
            answer = _exported(directory, scheme, batches[:-1], theirs, _as_in(ours, scheme))
        lines = oracle.differences(ours, theirs)
        values = [line for line in lines if "values differ" in line]
        if values:
            return _judged(directory, scheme, batches, ours, theirs, answer.live)
    except Exception as error:  # in many ways
        return Ended("right", _shortened(f"{RAISES} {type(error).__name__}: {error}", directory.parent))
    return Ended("right" if lines else "equal", " · ".join(lines[:2])[:300])


def _as_in(ours: Path, scheme: str) -> dict[str, Any]:
    """Changes of a preset by which ModelOpt quantizes the matrices that ours has quantized."""
    return {f"{name}.{part}": {"enable": True} for name in sorted(quantized(ours)) for part in _quantizers(scheme)}


def _quantizers(scheme: str) -> tuple[str, ...]:
    return ("weight_quantizer", "input_quantizer") if scheme == "fp8" else ("weight_quantizer",)


def _exported(directory: Path, scheme: str, batches: list[Any], out: Path, changes: Any = None) -> Answer:
    """Let ModelOpt export. It finds matrices that share an input by two tokens; of a model that reads other things, by
    the inputs that such a model tells it: the first batch.
    """
    answer = _asked(directory, scheme, batches, changes)
    try:
        oracle.export(answer, out, torch.bfloat16)
    except oracle.TheirsRaises:
        shutil.rmtree(out, ignore_errors=True)
        answer = _asked(directory, scheme, batches, changes)
        answer.model.get_dummy_inputs = lambda: batches[0]
        oracle.export(answer, out, torch.bfloat16)
    return answer


def _asked(directory: Path, scheme: str, batches: list[Any], changes: dict[str, Any] | None = None) -> Answer:
    model = oracle.load(directory)
    # a cache may round keys and values, and ours runs without one
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def loop(fake: Any) -> None:
        for batch in batches:
            fake(**batch, **more)

    with oracle._quiet(), torch.no_grad():
        return ask(model, scheme, loop, changes=changes)


def _coarse(directory: Path, scheme: str, batches: list[Any], ours: Path, why: str) -> Ended:
    """Outputs failed a gate: are they ModelOpt's, or nearer to the float model's than those of its own model?"""
    ended = compare_export(directory, scheme, batches, ours, ours.with_name(f"{ours.name}-theirs"))
    if ended.end in ("equal", "right") and not ended.words.startswith(RAISES):
        alike = ended.words or "every byte is ModelOpt's"
        return Ended("right", f"{why}, as coarse as the scheme is: {alike}"[:300])
    if scheme != "int4_awq":
        if ended.words.startswith(RAISES) and _same_scales(ours, _asked(directory, scheme, batches[:-1])):
            return Ended(
                "right", f"{why}, as coarse as the scheme is: scales are of ModelOpt's amax; {ended.words}"[:300]
            )
        return Ended("wrong", f"{why}; {ended.words}"[:300])
    mine = output_error(directory, ours, batches[-1], ours.with_name("decoded"))
    model = _asked(directory, scheme, batches[:-1]).model
    theirs = distance(model.float(), directory, batches[-1], ours.with_name("decoded"))
    words = f"{why}, as coarse as the scheme is: {mine:.3f} from the float model's, ModelOpt's own {theirs:.3f}"
    return Ended("right" if mine < theirs else "wrong", words)


def _same_scales(ours: Path, answer: Answer) -> bool:
    """Whether every scale of an FP8 checkpoint is an amax of ModelOpt's quantizers, divided by 448."""
    stored, chosen = load_file(ours / "model.safetensors"), quantized(ours)
    modules = {name: answer.model.get_submodule(answer.live[name]) for name in chosen & answer.live.keys()}
    return (
        bool(chosen)
        and modules.keys() == chosen
        and all(
            torch.equal(stored[f"{name}.{scale}"], (quantizer.amax.float() / 448).reshape(()))
            for name, module in modules.items()
            for scale, quantizer in (("weight_scale", module.weight_quantizer), ("input_scale", module.input_quantizer))
        )
    )


def _judged(directory: Path, scheme: str, batches: list[Any], ours: Path, theirs: Path, live: dict[str, str]) -> Ended:
    """Ask again with ours' choice of matrices: which export's outputs are nearer to those of the float model?"""
    if lost := sorted(names(directory) - names(theirs)):
        return Ended("right", f"ModelOpt's file has names of the model in memory: it lacks {lost[0]}")
    chosen, known = quantized(ours), {name: name for name in quantized(theirs)} | live  # a tied head is not in `live`
    parts = _quantizers(scheme)
    changes = {f"{module}.{part}": {"enable": name in chosen} for name, module in known.items() for part in parts}
    theirs, work = theirs.with_name(f"{theirs.name}-alike"), ours.with_name("decoded")
    _exported(directory, scheme, batches[:-1], theirs, changes)
    lines = oracle.differences(ours, theirs)
    values = [line for line in lines if "values differ" in line]
    if not values:
        return Ended("right", "equal to ModelOpt's with the same matrices quantized")
    if float_ := [line for line in lines if line.endswith(".weight_scale only ours")]:
        return Ended("right", f"ModelOpt's file holds {len(float_)} matrices unquantized that it calls quantized")
    mine, other = (output_error(directory, checkpoint, batches[-1], work) for checkpoint in (ours, theirs))
    folded = any("norm" in line.lower() for line in values)
    why = ": it multiplies pre-scales into norms that others read, or of 1 + weight" if folded else f": {values[0]}"
    words = f"outputs {mine:.3f} from the float model's, ModelOpt's {other:.3f}{why}"
    return Ended("right" if mine < other else "differs", words)


def compare_logits(model: Any, out: Path) -> Ended:
    """Hold graphs to transformers: decoders through the cache and left-padded, others by their first output."""
    if is_multimodal(out):
        return _near(lambda: seeing.distances(model, out))
    if not (out / "model.onnx").exists() and not (out / "encoder.onnx").exists():
        return Ended("right", f"not run: {', '.join(sorted(path.name for path in out.glob('*.onnx')))}")
    given = feeds(model, 7)
    arrays = {
        name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for name, tensor in given.items()
    }

    def compared() -> dict[str, float]:
        with torch.no_grad():
            theirs = model(**given)
        first = (theirs if isinstance(theirs, torch.Tensor) else theirs[0]).float().numpy()
        if (out / "encoder.onnx").exists():
            return _translated(model, EncoderDecoder(out), arrays, first)
        return _one_graph(model, Runtime(out), arrays, theirs, first)

    return _near(compared, lambda: _rounding(model, given))


def _near(compared: Callable[[], dict[str, float]], rounding: Callable[[], float] = lambda: 0.0) -> Ended:
    """Whether all that was compared lies near. `rounding`: how far float32 itself is, where it does not."""
    try:
        far = compared()
        words = ", ".join(f"{what} {error:.0e}" for what, error in far.items())
        if _all_below(FLOAT, far):
            return Ended("right", words)
    except Exception as error:
        return Ended("wrong", f"{type(error).__name__}: {error}"[:300])
    try:
        own = rounding()
    except RuntimeError:  # not every product of torch takes float64
        own = 0.0
    if _all_below(ROUNDINGS * own, far):
        return Ended("right", f"{words}, where transformers' float32 is {own:.0e} from its float64")
    return Ended("wrong", words)


def _all_below(bound: float, far: dict[str, float]) -> bool:
    """False for NaN, which `max` passes over."""
    return all(error < bound for error in far.values())


def _rounding(model: Any, given: dict[str, torch.Tensor]) -> float:
    """How far transformers' own output in float32 is from that in float64."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        theirs, wanted = (
            one(**{name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()})
            for one, dtype in ((model, torch.float32), (exact, torch.float64))
        )
    return relative_l2(theirs[0].numpy(), wanted[0].numpy())


def _one_graph(model: Any, runtime: Runtime, arrays: Arrays, theirs: Any, first: np.ndarray) -> dict[str, float]:
    if runtime.cached:
        return _decoded(model, runtime, arrays["input_ids"], first)
    sound = next(iter(arrays.values()))
    more = {"attention_mask": np.ones(sound.shape[:2], np.int64)} if "input_features" in arrays else {}
    ours = runtime.run({name: array for name, array in (more | arrays).items() if name in runtime.inputs})
    wanted = {name: array.float().numpy() for name in ours if hasattr(array := getattr(theirs, name, None), "float")}
    wanted = wanted or {runtime.outputs[0]: first}
    return {"outputs": float(np.max([relative_l2(ours[name], array) for name, array in wanted.items()]))}


def _translated(model: Any, pair: EncoderDecoder, arrays: Arrays, wanted: np.ndarray) -> dict[str, float]:
    """How far the logits of an encoder and a decoder are: of one pass, and of steps through the caches."""
    tokens = arrays["decoder_input_ids"]
    source = pair.source({name: array for name, array in arrays.items() if name in pair.encoder.inputs})
    made, own = [], {}
    for at in range(tokens.shape[1]):
        logits, own = pair.step(tokens[:, at : at + 1], source, own)
        made.append(logits)
    steps = np.stack(made, 1)
    far = {"logits": relative_l2(pair.run(arrays)["logits"], wanted), "steps": relative_l2(steps, wanted)}
    if far["steps"] > FLOAT:  # ProphetNet's own steps give other logits than its pass
        far["steps"] = relative_l2(steps, _stepped(model, arrays))
    return far


def _stepped(model: Any, arrays: Arrays) -> np.ndarray:
    """transformers' logits of the decoder's tokens one by one."""
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    made, past = [], None
    with torch.no_grad():
        for token in given.pop("decoder_input_ids").split(1, 1):
            out = model(**given, decoder_input_ids=token, past_key_values=past, use_cache=True)
            past = out.past_key_values
            made.append(out.logits)
    return torch.cat(made, 1).numpy()


def _decoded(model: Any, runtime: Runtime, tokens: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """How far the logits are: of one pass, of steps through the cache, and of a batch that is padded on the left."""
    length, pad = tokens.shape[1], 3
    whole = _pieces(runtime, tokens, np.ones_like(tokens), [length])
    steps = _pieces(runtime, tokens, np.ones_like(tokens), [*range(length - STEPS, length + 1)])
    ids = np.concatenate([np.full((2, pad), 3), tokens], axis=1)
    mask = np.concatenate([np.zeros((2, pad), np.int64), np.ones_like(tokens)], axis=1)
    padded = _pieces(runtime, ids, mask, [length - STEPS, length + pad])[:, pad:]
    far = {what: relative_l2(got, wanted) for what, got in (("logits", whole), ("steps", steps), ("padded", padded))}
    if far["padded"] > FLOAT and "position_ids" not in inspect.signature(model.forward).parameters:
        with torch.no_grad():  # such a model counts the padding, too
            theirs = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        far["padded"] = relative_l2(padded, theirs.logits[:, pad:].float().numpy())
    return far


def _pieces(runtime: Runtime, tokens: np.ndarray, mask: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Logits of tokens that are fed in pieces that end at `cuts`, the states handed on."""
    past: dict[str, np.ndarray] = {}
    made, begin = [], 0
    for end in cuts:
        out = runtime.run({"input_ids": tokens[:, begin:end], "attention_mask": mask[:, :end], **past})
        past = {n.replace("present.", "past_key_values."): a for n, a in out.items() if n.startswith("present.")}
        made.append(out["logits"])
        begin = end
    return np.concatenate(made, axis=1)


def _shortened(text: str, work: Path) -> str:
    return " ".join(re.sub(r"/tmp/\S+", "", text.replace(f"{work}/", "")).split())[:400]


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def main(family: str, cell: str, work: str) -> None:
    """Print how the cell ended, as the last line."""
    torch.set_num_threads(1)
    try:
        ended = run(family, cell, Path(work))
    except Exception as error:  # of the model or of the comparison, not of ours
        ended = Ended(
            "crashed", _shortened(f"the sweep: {type(error).__name__}: {error} ({_place(error)})", Path(work))
        )
    print(json.dumps(asdict(ended)), flush=True)
    os._exit(0)
