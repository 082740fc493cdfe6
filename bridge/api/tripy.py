"""Doors with the names and signatures of Tripy's nanoGPT example, opened onto `bridge`; nothing is done here twice.

Two things differ from the example on purpose. `modelopt_quantize` leaves its argument as it is, and int4 keeps AWQ's
pre-scales and the blocks of ModelOpt, which the example drops and mixes up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import CalibrationError, PlanError, SourceError, UsageError, fold_layers, nearest
from bridge.scratch import scratch

if TYPE_CHECKING:
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source

HEAD = "*lm_head*"  # what ModelOpt's presets keep, and the example quantizes in float8
SEQUENCE = 512  # tokens at most, ModelOpt's default
# quant_mode -> what tp.Linear is built with, and the samples and batch size that the example calibrates with
MODES = {"int8-weight-only": ("int8", 64, 1), "int4-weight-only": ("int4", 16, 16), "float8": ("float8", 64, 1)}

ADVICE = {  # of target tripy and its loader -> what it comes to here
    "convert with dtype=": "call with dtype=",
    " (--dtype)": "",
    "convert with quant='int4_wo', linear=True, which tp.Linear holds": "build all of int4 in tp.Linear, which does",
    "give tokenizer=": "save the model with its tokenizer, and give the directory as model_type",
}


class UnknownMode(UsageError, NotImplementedError):
    """A `quant_mode` that is none of the example's."""


class NoSuchAttribute(UsageError, AttributeError):
    """A path of `get_submodule` that leads nowhere."""


def modelopt_quantize(model_hf: Any, quant_mode: str, *, dataset_name: Any = None, tokenizer: Any = None) -> Any:
    """Return the model that ModelOpt makes of `model_hf` in one of the example's modes, calibrated where it has to be.

    The model that is returned lies over the memory of `model_hf`, which stays unquantized. The example calibrates with
    cnn_dailymail from the hub and GPT-2's tokenizer; here it is the text that comes with bridge, and the tokenizer of
    the place that the model was loaded from. Samples and batch size are the example's.

    Args:
        quant_mode: "int8-weight-only", "int4-weight-only" (AWQ) or "float8" (weights, activations and the output head).
        dataset_name: what `create_forward_loop` takes.
        tokenizer: an object, a directory or a hub id.

    >>> quantized = modelopt_quantize(model, "float8")  # doctest: +SKIP
    """
    _check_mode(quant_mode)
    from bridge.api import fake_quantize
    from bridge.sources import open_source

    if not hasattr(model_hf, "named_modules"):
        raise UsageError(f"model_hf={model_hf!r}; give a transformers model in memory, as `from_pretrained` returns it")
    scheme = _scheme(quant_mode, [name for name, _ in model_hf.named_modules()])
    source = open_source(model_hf, tokenizer=tokenizer)
    loop = _calibration(source, quant_mode, dataset_name, model_hf.device) if scheme.needs_calibration else None
    return fake_quantize(source, scheme, loop).model


def create_forward_loop(
    model: Any = None,
    dataset_name: str | Path | None = "cnn_dailymail",
    tokenizer: Any = None,
    batch_size: int = 1,
    num_samples: int = 512,
    max_sample_length: int = SEQUENCE,
    device: Any = None,
    include_labels: bool = False,
    dataloader: Any = None,
    allowed_non_tensor_keys: set[str] | None = None,
) -> Callable[[Any], None]:
    """Return a function that runs the model it is given over calibration text, as ModelOpt's of this name does.

    Rows are padded to the longest on the tokenizer's side (left is best for decoders), without gradients or KV cache;
    a batch that CUDA has no memory for is halved. No row is longer than `model` has positions.

    Args:
        model: needed for batch_size=0, which tries how many rows CUDA has memory for. Without it the model that is run
            must have `max_sample_length` positions where rows are that long.
        dataset_name: a name that ModelOpt knows; or a text file, a JSONL file, another dataset id, or None for the text
            that comes with bridge. A text is cut into `num_samples` pieces.
        dataloader: batches; everything that makes some is ignored then.

    >>> import bridge
    >>> loop = bridge.create_forward_loop(dataset_name=None, tokenizer=tokenizer, num_samples=8)  # doctest: +SKIP
    >>> calibration = bridge.calibrate(model, "fp8", loop)  # doctest: +SKIP
    """
    from bridge.quant.modelopt import dataset_tools

    tools = dataset_tools()
    if dataloader is None:
        _check_text(dataset_name, tokenizer)
        _check_sizes(model, batch_size, num_samples, max_sample_length)
        length = min(max_sample_length, _positions(model) or max_sample_length)
        size = batch_size or tools.get_max_batch_size(model, length)
        if dataset_name in tools.get_supported_datasets():
            rows = (size, num_samples, length, device, include_labels)
            dataloader = _of_modelopt(tools, dataset_name, tokenizer, *rows)
        else:
            texts = _texts(dataset_name, tokenizer, num_samples)
            dataloader = _batches(texts, tokenizer, size, length, device, include_labels)
        longest = max(batch["input_ids"].shape[1] for batch in dataloader)
    else:
        longest = 0  # batches of the user's own, made once perhaps: not looked at
    run = tools.create_forward_loop(dataloader=dataloader, allowed_non_tensor_keys=allowed_non_tensor_keys)

    def loop(model: Any) -> None:
        if longest > (most := _positions(model) or longest):
            raise UsageError(
                f"rows of {longest} tokens, and {type(model).__name__} has {most} positions; give "
                f"create_forward_loop max_sample_length={most}, or model="
            )
        run(model)

    return loop


def convert_to_scale(amax: Any, maxbound: float) -> Any:
    """Return amax / maxbound, divided in float32: a tensor for a tensor, an array for anything else.

    >>> float(convert_to_scale(127.0, 127))
    1.0
    """
    try:
        positive = bool(0 < maxbound < float("inf"))
    except (TypeError, ValueError, RuntimeError):  # no number at all, or several
        positive = False
    if not positive:
        raise UsageError(f"maxbound={maxbound!r}; expected a positive number: 127 for int8, 7 for int4, 448 for float8")
    if hasattr(amax, "detach"):
        # a number in place of a tensor would make CUDA multiply with its reciprocal, which rounds twice
        return amax.float() / amax.new_tensor(float(maxbound), dtype=amax.float().dtype)
    import numpy as np

    try:
        found = np.asarray(amax)
    except (TypeError, ValueError):  # rows of unequal length
        found = np.asarray(None)
    if found.dtype.kind in "OSUmMc":  # np.float32(None) would be NaN
        raise UsageError(
            f"amax is a {type(amax).__name__}; expected numbers: a torch tensor, an array, a list or a number (an "
            "nvtripy tensor goes through NumPy: copy it to the CPU, then np.from_dlpack)"
        )
    return found.astype(np.float32) / np.float32(maxbound)


def get_submodule(module: Any, attr_name: str) -> Any:
    """Follow a dotted path from `module` over ModuleLists (numbers), ModuleDicts (keys) and any other attributes.

    Raises:
        NoSuchAttribute: an `AttributeError` that names the step where the path ends, and what there is instead.

    >>> from types import SimpleNamespace
    >>> get_submodule(SimpleNamespace(head=SimpleNamespace(bias=1)), "head.bias")
    1
    """
    if not isinstance(attr_name, str):
        raise UsageError(f"attr_name={attr_name!r}; expected a dotted path, 'transformer.h.0.attn' for one")
    import torch

    found, steps = module, attr_name.split(".")
    for at, step in enumerate(steps):
        try:
            if isinstance(found, torch.nn.ModuleList):
                found = found[int(step)]
            elif isinstance(found, torch.nn.ModuleDict):
                found = found[step]
            else:
                found = getattr(found, step)
        except (AttributeError, IndexError, KeyError, ValueError) as cause:
            here, inside = ".".join(steps[:at]) or "the module", _inside(found)
            raise NoSuchAttribute(
                f"{attr_name!r}: {here} ({type(found).__name__}) has no {step!r}"
                + (f"; {nearest(step, inside)}" if inside else "")
            ) from cause
    return found


def load_weights_from_hf(model: Any, model_type: Any, dtype: Any) -> None:
    """Fill `model`, a `tp.Module` with the names of the checkpoint, with the weights of `model_type`, unquantized.

    Args:
        model_type: a hub id, a directory, or a `transformers` model in memory.
        dtype: of the module: tp.float32, tp.float16, tp.bfloat16, or one of their names.

    >>> load_weights_from_hf(GPT(config), "gpt2", tp.float16)  # doctest: +SKIP
    """
    if linears := _quantized(model):
        raise UsageError(
            f"the module is quantized ({', '.join(fold_layers(linears))}); build it without quant_dtype, or call "
            "load_quant_weights_from_hf"
        )
    _load(model, model_type, dtype, "none")


def load_quant_weights_from_hf(model: Any, model_type: Any, dtype: Any, quant_mode: str) -> None:
    """Fill `model`, a `tp.Module` whose linear layers are built for `quant_mode`, with weights and scales.

    Calibrates as `modelopt_quantize` does. Two things follow from how the module is built: float8 takes the output head
    along where it is quantized, and int4 in plain `tp.Linear` gets blocks along its outputs and no AWQ, which is all
    that it can hold; `bridge.tripy.layers.BlockLinear` holds what ModelOpt makes.

    >>> load_quant_weights_from_hf(GPT(config), "gpt2", tp.float16, "int8-weight-only")  # doctest: +SKIP
    """
    _check_mode(quant_mode)
    linears = _quantized(model)
    built_for = {linear.quant_dtype.name for linear in linears.values()}
    if built_for != {MODES[quant_mode][0]}:
        raise UsageError(
            f"quant_mode={quant_mode!r} needs linear layers with quant_dtype {MODES[quant_mode][0]}, the module has "
            f"{' and '.join(sorted(built_for)) or 'no quantized linear layers'}"
        )
    from bridge.sources import open_source
    from bridge.tripy.frontend import nvtripy

    source = open_source(model_type)
    if quant_mode == "int4-weight-only" and any(isinstance(found, nvtripy().Linear) for found in linears.values()):
        _load(model, source, dtype, "int4_wo", linear=True)
        return
    scheme = _scheme(quant_mode, linears)
    try:
        loop = _calibration(source, quant_mode, None, None) if scheme.needs_calibration else None
    except UsageError as error:
        raise UsageError(_told(str(error))) from error
    _load(model, source, dtype, scheme, calib=loop)


def _load(module: Any, model: Any, dtype: Any, quant: str | Scheme, *, linear: bool = False, calib: Any = None) -> None:
    """Convert to target `tripy` in a temporary directory and load that; a module that would not fit is told first."""
    from bridge.api import convert, plan
    from bridge.sources import open_source
    from bridge.tripy.loading import Written, fit, load

    if dtype is None:
        raise UsageError("dtype=None; give the module's: tp.float16, for one")
    source, options = open_source(model), {"dtype": dtype, "linear": linear}
    with scratch() as folder:
        written = folder / source.name
        try:
            fit(Written.planned(plan(source, "tripy", quant, **options)), module, str(written))
            convert(source, "tripy", quant, written, calib=calib, verify=False, **options)
            load(written, module)
        except (PlanError, SourceError) as error:
            raise type(error)(_told(str(error).replace(str(written), f"model_type {source.where}"))) from error


def _told(message: str) -> str:
    """The message with advice that the caller of a door can follow, who writes no directory."""
    for theirs, ours in ADVICE.items():
        message = message.replace(theirs, ours)
    if "recipe" in message:
        message += (
            "\n  recipes: bridge.convert(model_type, 'tripy', 'recipe.toml', out), then bridge.targets.tripy.load"
        )
    return message


def _check_mode(quant_mode: str) -> None:
    if not isinstance(quant_mode, str) or quant_mode not in MODES:
        raise UnknownMode(f"quant_mode={quant_mode!r} is unknown; {nearest(str(quant_mode), MODES)}")


def _scheme(quant_mode: str, modules: Iterable[str]) -> Scheme:
    """The scheme of a mode; float8 quantizes the output head, too, where `modules` has one."""
    from bridge.quant.scheme import Rule, load_scheme

    scheme = load_scheme(quant_mode)
    if quant_mode != "float8" or not any(fnmatchcase(name, HEAD) for name in modules):
        return scheme
    head = Rule("float8", scheme.name, scheme.format, scheme.parity.tensor, modules=(HEAD,))
    return replace(scheme, rules=(head,))


def _calibration(source: Source, quant_mode: str, dataset_name: Any, device: Any) -> Callable[[Any], None]:
    """The example's forward loop: its samples and batch size, padded left, the end of text as padding."""
    from bridge.quant.data import positions

    tokenizer = copy.deepcopy(source.load_tokenizer())
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    _, samples, batch = MODES[quant_mode]
    length = min(SEQUENCE, positions(source.config) or SEQUENCE)
    return create_forward_loop(None, dataset_name, tokenizer, batch, samples, length, device)


def _quantized(module: Any) -> dict[str, Any]:
    """The quantized linear layers of a `tp.Module`, by name."""
    from bridge.tripy.frontend import nvtripy
    from bridge.tripy.loading import parts_of

    if not isinstance(module, nvtripy().Module):
        raise UsageError(f"model is a {type(module).__name__}; give the nvtripy.Module to fill")
    return {name: found for name, found in parts_of(module) if getattr(found, "quant_dtype", None) is not None}


def _check_text(dataset_name: Any, tokenizer: Any) -> None:
    if not isinstance(dataset_name, str | Path | None):
        raise UsageError(f"dataset_name={dataset_name!r}; expected one name, a file or None")
    if tokenizer is None:
        raise UsageError("create_forward_loop needs a tokenizer, or a dataloader in place of text")
    if not hasattr(tokenizer, "pad_token"):
        raise UsageError(f"tokenizer={tokenizer!r}; give one in memory: AutoTokenizer.from_pretrained(...)")
    if tokenizer.pad_token is None:
        raise UsageError("the tokenizer has no padding token; set one: tokenizer.pad_token = tokenizer.eos_token")


def _check_sizes(model: Any, batch_size: Any, num_samples: int, max_sample_length: int) -> None:
    if isinstance(batch_size, str) or type(batch_size).__name__ == "device":
        raise UsageError(
            f"batch_size={batch_size!r} is a device, which is the 7th argument, as in ModelOpt; write the ones after "
            "tokenizer by name: device=..., batch_size=..., num_samples=..."
        )
    least = {
        "batch_size": (batch_size, 0),
        "num_samples": (num_samples, 1),
        "max_sample_length": (max_sample_length, 1),
    }
    if wrong := [f"{name}={value!r}" for name, (value, low) in least.items() if type(value) is not int or value < low]:
        raise UsageError(f"{', '.join(wrong)}; expected positive whole numbers (batch_size=0 asks CUDA)")
    import torch

    if not batch_size and (model is None or not torch.cuda.is_available()):
        raise UsageError("batch_size=0 tries how many rows CUDA has memory for: give model=, on a machine with CUDA")


def _positions(model: Any) -> int | None:
    """How many positions a `transformers` model has, None where it does not say."""
    from bridge.quant.data import positions

    config: Any = getattr(model, "config", None)
    return positions(config.to_dict()) if hasattr(config, "to_dict") else None


def _of_modelopt(tools: Any, name: Any, *rows: Any) -> Any:
    try:
        return list(tools.get_dataset_dataloader(name, *rows))  # tokenized by now in any case
    except Exception as cause:  # hub, cache and parsing errors have no common base
        said = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CalibrationError(
            f"dataset {name} cannot be loaded here: {said[0][:300]}; without network give dataset_name= a text or "
            "JSONL file, or None for the text that comes with bridge"
        ) from cause


def _texts(dataset_name: str | Path | None, tokenizer: Any, count: int) -> list[str]:
    """At most `count` texts: the documents as they come, one alone cut into pieces."""
    from bridge.quant.data import documents

    texts = documents(dataset_name, lambda: tokenizer, count)
    if len(texts) == 1:
        cuts = [at * len(texts[0]) // count for at in range(count + 1)]
        texts = [texts[0][begin:end] for begin, end in pairwise(cuts)]
    if not (kept := [text for text in texts if text.strip()]):
        raise CalibrationError(f"{dataset_name}: the calibration text is empty")
    return kept[:count]


def _batches(
    texts: list[str], tokenizer: Any, batch_size: int, longest: int, device: Any, labels: bool
) -> list[dict[str, Any]]:
    tokenizer = copy.deepcopy(tokenizer)  # padding and truncation stay set on the one that encodes
    encoded = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=longest)
    rows = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    if labels:
        rows["labels"] = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    parts = {name: tensor.to(device).split(batch_size) for name, tensor in rows.items()}
    return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]


def _inside(module: Any) -> list[str]:
    """What a path can go on with: a module's children, tensors and public attributes; of a container its children."""
    held = getattr(module, "__dict__", {})
    children = [name for part in ("_modules", "_parameters", "_buffers") for name in held.get(part, ())]
    if type(module).__name__ in ("ModuleList", "ModuleDict"):
        return children
    return [*children, *(name for name in held if name[0] != "_")]
