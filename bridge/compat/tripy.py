"""The functions of Tripy's nanoGPT example, with the same signatures.

Two intended differences from the example: `modelopt_quantize` leaves its argument as it is, and int4 keeps AWQ's
pre-scales and ModelOpt's blocks (the example drops the first and mixes up the second).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bridge.compat.forward_batches import check_sizes, check_text, dataset, is_device, positions_of
from bridge.core.errors import PlanError, SourceError, UsageError
from bridge.core.output.temporary import temporary_directory
from bridge.core.text import fold_layers, nearest
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Rule, Scheme
from bridge.targets.tripy.frontend import nvtripy

if TYPE_CHECKING:
    from bridge.sources.source import Source

HEAD = "*lm_head*"  # ModelOpt's presets leave it unquantized; the example quantizes it in float8
MAX_TOKENS = 512  # per row; ModelOpt's default
# quant_mode -> quant_dtype of tp.Linear, and the example's number of calibration samples and batch size
MODES = {"int8-weight-only": ("int8", 64, 1), "int4-weight-only": ("int4", 16, 16), "float8": ("float8", 64, 1)}

ADVICE = {  # text of the target tripy and its loader -> the same for a caller of these functions
    "convert with dtype=": "call with dtype=",
    " (--dtype)": "",
    "convert with quant='int4_wo', linear=True, which tp.Linear holds": "build all of int4 in tp.Linear, which does",
    " (--tokenizer)": "",
    "give tokenizer=": "save the model with its tokenizer, and give the directory as model_type",
}
F = TypeVar("F", bound=Callable[..., Any])
# Tripy's order of the arguments of `create_forward_loop` from the fourth on.
FROM_FOURTH = (
    "device", "batch_size", "num_samples", "max_sample_length", "include_labels", "dataloader",
    "allowed_non_tensor_keys",
)  # fmt: skip


class UnknownMode(UsageError, NotImplementedError):
    """A `quant_mode` that the example does not have."""


class NoSuchAttribute(UsageError, AttributeError):
    """A path given to `get_submodule` that does not exist."""


def modelopt_quantize(model_hf: Any, quant_mode: str, *, dataset_name: Any = None, tokenizer: Any = None) -> Any:
    """Return the model that ModelOpt makes of `model_hf` in one of the example's modes, calibrated if necessary.

    The returned model shares its memory with `model_hf`, which stays unquantized. The example calibrates with
    cnn_dailymail from the hub and GPT-2's tokenizer; bridge uses its own text, and the tokenizer of the place that the
    model was loaded from. The number of samples and the batch size are the example's.

    Args:
        quant_mode: "int8-weight-only", "int4-weight-only" (AWQ) or "float8" (weights, activations and the output head).
        dataset_name: as in `create_forward_loop`.
        tokenizer: an object, a directory or a hub id.

    >>> quantized = modelopt_quantize(model, "float8")  # doctest: +SKIP
    """
    _check_mode(quant_mode)
    from bridge.api.verbs import fake_quantize
    from bridge.sources.opening import open_source

    if not hasattr(model_hf, "named_modules"):
        raise UsageError(f"model_hf={model_hf!r}; give a transformers model in memory, as `from_pretrained` returns it")
    scheme = _scheme(quant_mode, [name for name, _ in model_hf.named_modules()])
    source = open_source(model_hf, tokenizer=tokenizer)
    loop = _calibration(source, quant_mode, dataset_name, model_hf.device) if scheme.needs_calibration else None
    return fake_quantize(source, scheme, loop).model


def _in_either_order(function: F) -> F:
    """Take Tripy's order, whose fourth positional argument is a device, beside ModelOpt's."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if 3 < len(args) <= 3 + len(FROM_FOURTH) and is_device(args[3]):
            return function(*args[:3], **dict(zip(FROM_FOURTH, args[3:], strict=False)), **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


@_in_either_order
def create_forward_loop(
    model: Any = None,
    dataset_name: str | Path | None = "cnn_dailymail",
    tokenizer: Any = None,
    batch_size: int = 1,
    num_samples: int = 512,
    max_sample_length: int = MAX_TOKENS,
    device: Any = None,
    include_labels: bool = False,
    dataloader: Any = None,
    allowed_non_tensor_keys: set[str] | None = None,
) -> Callable[[Any], None]:
    """Return a function that runs a model over calibration text, like ModelOpt's function of this name.

    Rows are padded to the longest row, on the tokenizer's padding side (left is best for decoders). The model runs
    without gradients or KV cache. A batch that does not fit CUDA memory is halved. No row is longer than `model` has
    positions. A device as the fourth positional argument begins Tripy's order: device, batch_size, num_samples,
    max_sample_length.

    Args:
        model: needed for batch_size=0, which tries how many rows fit CUDA memory. Without it, the model that is run
            must have `max_sample_length` positions if rows are that long.
        dataset_name: a name that ModelOpt knows; or a text file, a JSONL file, another dataset id, or None for the text
            that comes with bridge. A text is cut into `num_samples` pieces.
        dataloader: batches; the arguments that describe batches are then ignored.

    >>> import bridge
    >>> loop = bridge.create_forward_loop(dataset_name=None, tokenizer=tokenizer, num_samples=8)  # doctest: +SKIP
    >>> calibration = bridge.calibrate(model, "fp8", loop)  # doctest: +SKIP
    """
    from bridge.calibration.modelopt import part

    tools, longest = part("torch.utils.dataset_utils"), 0  # the user's batches may be readable only once: not checked
    if dataloader is None:
        check_text(dataset_name, tokenizer)
        check_sizes(model, batch_size, num_samples, max_sample_length)
        length = min(max_sample_length, positions_of(model) or max_sample_length)
        size = batch_size or tools.get_max_batch_size(model, length)
        dataloader = dataset(tools, dataset_name, tokenizer, size, num_samples, length, device, include_labels)
        longest = max(batch["input_ids"].shape[1] for batch in dataloader)
    run = tools.create_forward_loop(dataloader=dataloader, allowed_non_tensor_keys=allowed_non_tensor_keys)

    def loop(model: Any) -> None:
        if longest > (limit := positions_of(model) or longest):
            raise UsageError(
                f"rows have {longest} tokens, but {type(model).__name__} has {limit} positions; give "
                f"create_forward_loop max_sample_length={limit}, or model="
            )
        run(model)

    return loop


def convert_to_scale(amax: Any, maxbound: float) -> Any:
    """Return amax / maxbound, divided in float32: a tensor for a tensor, else an array.

    >>> float(convert_to_scale(127.0, 127))
    1.0
    """
    try:
        positive = bool(0 < maxbound < float("inf"))
    except (TypeError, ValueError, RuntimeError):  # not a number, or several numbers
        positive = False
    if not positive:
        raise UsageError(f"maxbound={maxbound!r}; expected a positive number: 127 for int8, 7 for int4, 448 for float8")
    if hasattr(amax, "detach"):
        # with a Python number CUDA would multiply by its reciprocal, which rounds twice
        return amax.float() / amax.new_tensor(float(maxbound), dtype=amax.float().dtype)
    import numpy as np

    try:
        values = np.asarray(amax)
    except (TypeError, ValueError):  # rows of different lengths
        values = np.asarray(None)
    if values.dtype.kind in "OSUmMc":  # np.float32(None) would be NaN
        raise UsageError(
            f"amax is a {type(amax).__name__}; expected numbers: a torch tensor, an array, a list or a number (an "
            "nvtripy tensor goes through NumPy: copy it to the CPU, then np.from_dlpack)"
        )
    return values.astype(np.float32) / np.float32(maxbound)


def get_submodule(module: Any, attr_name: str) -> Any:
    """Follow a dotted path from `module` through ModuleLists (numbers), ModuleDicts (keys) and attributes.

    Raises:
        NoSuchAttribute: an `AttributeError` that names the first missing step, and the names that exist there.

    >>> from types import SimpleNamespace
    >>> get_submodule(SimpleNamespace(head=SimpleNamespace(bias=1)), "head.bias")
    1
    """
    if not isinstance(attr_name, str):
        raise UsageError(f"attr_name={attr_name!r}; expected a dotted path, for example 'transformer.h.0.attn'")
    import torch

    steps = attr_name.split(".")
    for i, step in enumerate(steps):
        try:
            if isinstance(module, torch.nn.ModuleList):
                module = module[int(step)]
            elif isinstance(module, torch.nn.ModuleDict):
                module = module[step]
            else:
                module = getattr(module, step)
        except (AttributeError, IndexError, KeyError, ValueError) as cause:
            where, known = ".".join(steps[:i]) or "the module", _children(module)
            raise NoSuchAttribute(
                f"{attr_name!r}: {where} ({type(module).__name__}) has no {step!r}"
                + (f"; {nearest(step, known)}" if known else "")
            ) from cause
    return module


def load_weights_from_hf(model: Any, model_type: Any, dtype: Any) -> None:
    """Fill `model`, a `tp.Module` with the checkpoint's names, with the weights of `model_type`, unquantized.

    Args:
        model_type: a hub id, a directory, or a `transformers` model in memory.
        dtype: the module's: tp.float32, tp.float16, tp.bfloat16, or one of their names.

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

    Calibrates like `modelopt_quantize`. Two things depend on how the module is built: float8 quantizes the output head
    if the module's head is quantized; int4 in plain `tp.Linear` gets blocks along its outputs and no AWQ, which is all
    that this layer supports. `bridge.targets.tripy.models.layers.BlockLinear` supports what ModelOpt makes.

    >>> load_quant_weights_from_hf(GPT(config), "gpt2", tp.float16, "int8-weight-only")  # doctest: +SKIP
    """
    _check_mode(quant_mode)
    linears = _quantized(model)
    built_for = {linear.quant_dtype.name for linear in linears.values()}
    if built_for != {MODES[quant_mode][0]}:
        raise UsageError(
            f"quant_mode={quant_mode!r} needs linear layers with quant_dtype {MODES[quant_mode][0]}, but the module "
            f"has {' and '.join(sorted(built_for)) or 'no quantized linear layers'}"
        )
    from bridge.sources.opening import open_source

    source = open_source(model_type)
    if quant_mode == "int4-weight-only" and any(isinstance(layer, nvtripy().Linear) for layer in linears.values()):
        _load(model, source, dtype, "int4_wo", linear=True)
        return
    scheme = _scheme(quant_mode, linears)
    try:
        loop = _calibration(source, quant_mode, None, None) if scheme.needs_calibration else None
    except UsageError as error:
        raise UsageError(_advice_for_callers(str(error))) from error
    _load(model, source, dtype, scheme, calib=loop)


def _load(module: Any, model: Any, dtype: Any, quant: str | Scheme, *, linear: bool = False, calib: Any = None) -> None:
    """Convert to target `tripy` in a temporary directory and load it, after a check that the module fits."""
    from bridge.api.plans import plan
    from bridge.api.verbs import convert
    from bridge.sources.opening import open_source
    from bridge.targets.tripy.loading import StateDictFiles, fit, load

    if dtype is None:
        raise UsageError("dtype=None; give the module's dtype, for example tp.float16")
    source, options = open_source(model), {"dtype": dtype, "linear": linear}
    with temporary_directory() as folder:
        written = folder / source.name
        try:
            fit(StateDictFiles.planned(plan(source, "tripy", quant, **options)), module, str(written))
            convert(source, "tripy", quant, written, calib=calib, verify=False, **options)
            load(written, module)
        except (PlanError, SourceError) as error:
            message = str(error).replace(str(written), f"model_type {source.where}")
            raise type(error)(_advice_for_callers(message)) from error


def _advice_for_callers(message: str) -> str:
    """The message with advice that fits these functions, whose callers write no directory."""
    for advice, here in ADVICE.items():
        message = message.replace(advice, here)
    if "recipe" in message:
        message += (
            "\n  recipes: bridge.convert(model_type, 'tripy', 'recipe.toml', out), then bridge.targets.tripy.load"
        )
    return message


def _check_mode(quant_mode: str) -> None:
    if not isinstance(quant_mode, str) or quant_mode not in MODES:
        raise UnknownMode(f"quant_mode={quant_mode!r} is unknown; {nearest(str(quant_mode), MODES)}")


def _scheme(quant_mode: str, modules: Iterable[str]) -> Scheme:
    """The scheme of a mode; float8 also quantizes the output head if `modules` has one."""
    scheme = load_scheme(quant_mode)
    if quant_mode != "float8" or not any(fnmatchcase(name, HEAD) for name in modules):
        return scheme
    head = Rule("float8", scheme.name, scheme.format, scheme.parity.tensor, modules=(HEAD,))
    return replace(scheme, rules=(head,))


def _calibration(source: Source, quant_mode: str, dataset_name: Any, device: Any) -> Callable[[Any], None]:
    """The example's forward loop: its samples and batch size, padded left with the end-of-text token."""
    from bridge.sources.configs.positions import positions

    tokenizer = copy.deepcopy(source.load_tokenizer())
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    _, samples, batch = MODES[quant_mode]
    length = min(MAX_TOKENS, positions(source.config) or MAX_TOKENS)
    return create_forward_loop(None, dataset_name, tokenizer, batch, samples, length, device)


def _quantized(module: Any) -> dict[str, Any]:
    """The quantized linear layers of a `tp.Module`, by name."""
    from bridge.targets.tripy.loading import parts_of

    if not isinstance(module, nvtripy().Module):
        raise UsageError(f"model is a {type(module).__name__}; give the nvtripy.Module to fill")
    return {name: part for name, part in parts_of(module) if getattr(part, "quant_dtype", None) is not None}


def _children(module: Any) -> list[str]:
    """Possible next steps of a path: a module's children, tensors and public attributes; a container's children."""
    attributes = getattr(module, "__dict__", {})
    children = [name for part in ("_modules", "_parameters", "_buffers") for name in attributes.get(part, ())]
    if type(module).__name__ in ("ModuleList", "ModuleDict"):
        return children
    return [*children, *(name for name in attributes if name[0] != "_")]
