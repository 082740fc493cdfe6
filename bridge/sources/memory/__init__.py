"""A `transformers` or `diffusers` model in memory as a source.

It is never changed, and only what is read is copied.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.core.arrays import np
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.output.temporary import temporary_directory
from bridge.core.text import listed, named
from bridge.core.values import Program, TensorSpec
from bridge.sources.config_json import settle_config
from bridge.sources.configs.diffusion import config_text, is_diffusion_model, with_architecture
from bridge.sources.configs.tokenizer_files import given_files
from bridge.sources.live_models import loading
from bridge.sources.source import SourceBase
from bridge.sources.weights.unsupported import quantized

if TYPE_CHECKING:  # it imports torch, which opening a directory must not
    from bridge.sources.checkpoint import HfSource
    from bridge.sources.live_models.checkpoint_names import Origin

WRITTEN_BY = (
    Program(
        "transformers",
        "5.5 and later",
        "names, bytes and configuration are those that `save_pretrained` writes; the model is as it was afterwards",
        (
            "tests/sources/live_models/test_checkpoint_names.py",
            "tests/sources/test_memory.py",
            "tests/matrix/test_matrix.py",
        ),
    ),
)


class MemorySource(SourceBase):
    """The caller's model, with the specs and values that `save_pretrained` would write."""

    dialect = "hf"
    can_run = True

    def __init__(self, model: Any, config: dict[str, Any], origins: dict[str, Origin], tokenizer: Any = None) -> None:
        from bridge.sources.live_models.checkpoint_names import tied_names, without_ties

        self.where = f"{type(model).__name__} in memory"
        self.name = Path(str(getattr(model, "name_or_path", "") or "")).name or type(model).__name__.lower()
        self.config: Mapping[str, Any] = config
        self.specs: Mapping[str, TensorSpec] = {name: origin.spec for name, origin in origins.items()}
        self.dropped: dict[str, str] = {a: f"tied to {b}" for a, b in sorted(tied_names(model).items())}
        self._model = model
        self._origins = origins
        self._state = without_ties(model, model.state_dict())  # references, no values
        self._planned = {name: (tensor.shape, tensor.dtype) for name, tensor in self._state.items()}
        self._tokenizer = tokenizer
        self._last = threading.local()  # the tensor that each thread reads rows of

    @cached_property
    def side_files(self) -> dict[str, Path | bytes]:
        """config.json, generation_config.json and the tokenizer's files as `transformers` writes them."""
        model, tokenizer = self._model, self._tokenizer
        files: dict[str, Path | bytes] = {}
        with temporary_directory() as root:
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(root)
            paths = sorted(path for path in root.rglob("*") if path.is_file())
            files |= {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
        files |= given_files(tokenizer) if tokenizer is not None else {}
        files["config.json"] = config_text(self.config)
        return files

    @property
    def device(self) -> Any:
        """The torch device of the first tensor."""
        return next(iter(self._state.values())).device

    def renew(self) -> None:
        """Read the tensors that the model has now; SourceError if one is gone, or is not as it was planned."""
        from bridge.sources.live_models.checkpoint_names import without_ties

        state = without_ties(self._model, self._model.state_dict())
        wrong: dict[str, list[str]] = {}
        for name, (shape, dtype) in self._planned.items():
            if name not in state:
                wrong.setdefault("was in the model when it was planned, and is not any more", []).append(name)
            elif state[name].shape != shape:
                why = f"had shape {tuple(shape)} when it was planned, and has {tuple(state[name].shape)}"
                wrong.setdefault(why, []).append(name)
            elif state[name].dtype != dtype:
                why = f"had dtype {dtype} when it was planned, and has {state[name].dtype}"
                wrong.setdefault(why, []).append(name)
            elif state[name].device.type == "meta":
                wrong.setdefault("has no values (meta device, or offloaded)", []).append(name)
        if wrong:
            raise listed(self.where, (f"{named(names)}: {why}; plan again" for why, names in wrong.items()))
        self._state = state

    def read(self, name: str) -> np.ndarray:
        """Return one storage array: read-only, and a view of the model's memory if possible."""
        return bits_of(self._tensor(name), self._origins[name].spec.dtype)

    def on_device(self, name: str, rows: tuple[int, int] | None = None) -> Any:
        """Return a tensor, or rows of it, where it is, not to be changed; None if it is coded on the host."""
        import torch

        from bridge.quant.codec.on_device import HOST, best_way

        parts = [self._local(part.live) for part in self._origins[name].parts]
        here = any(type(part) not in (torch.Tensor, torch.nn.Parameter) or best_way(part) == HOST for part in parts)
        return None if here else self._tensor(name)[slice(*(rows or (None,)))]

    def _tensor(self, name: str) -> Any:
        import torch

        from bridge.sources.live_models.checkpoint_names import computed

        origin = self._origins[name]
        with torch.no_grad():
            state = {part.live: self._whole(part.live) for part in origin.parts}
            if origin.computed:
                tensor = computed(self._model, origin, state)
            else:
                parts = [part.of(state[part.live]) for part in origin.parts]
                tensor = parts[0] if len(parts) == 1 else torch.cat(parts, origin.axis)
            if tensor.device.type == "meta":
                raise SourceError(f"{name}: has no values (meta device, or offloaded); give its directory instead")
            return tensor.detach()

    def _whole(self, live: str) -> Any:
        """A tensor of the model by its name there."""
        return self._state[live]

    def _local(self, live: str) -> Any:
        """What this process holds of a tensor of the model."""
        return self._state[live]

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows of one tensor; a tensor that must be joined is joined once for all its rows."""
        last = getattr(self._last, "read", None)
        if last is None or last[0] != name or begin == 0:
            last = self._last.read = (name, self.read(name))
        rows: np.ndarray = last[1][begin:end]
        if end >= self.specs[name].shape[0]:
            self._last.read = None
        return rows

    def place(self, name: str) -> tuple[str, int]:
        return "", 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config and all values: there is no file with a modification time."""
        return values_digest(self.config, self.specs, self.read)

    def load_model(self) -> Any:
        return self._model

    def load_skeleton(self) -> Any:
        from bridge.sources.live_models.meta_device import copy_skeleton

        return copy_skeleton(self._model)

    def load_tokenizer(self) -> Any:
        """Return the given tokenizer, else that of the directory or hub id that the model was loaded from."""
        return self._loaded_tokenizer

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        origin = str(getattr(self._model, "name_or_path", "") or "")
        return loading.load_tokenizer(self._tokenizer or origin or None, None, self.where)


Opened = TypeVar("Opened", bound=MemorySource)


def recognizes(model: object) -> bool:
    """Take torch modules; before torch is imported there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def open_model(model: Any, config: Any = None, tokenizer: Any = None) -> MemorySource | HfSource:
    """Open a model, also a GPTModel of Megatron-Core; SourceError for another module, quantized ones, and adapters."""
    if "megatron.core" in sys.modules:
        from bridge.sources.live_models.megatron import gpt_model, open_live

        if (gpt := gpt_model(model)) is not None:
            return open_live(gpt, config, tokenizer)
    from bridge.sources.memory.unwrapped import unwrapped

    return open_plain(unwrapped(model), config, tokenizer)


def open_plain(model: Any, config: Any = None, tokenizer: Any = None, opened: type[Opened] | None = None) -> Opened:
    """Open a model without wrappers, as a `MemorySource`, or as `opened`."""
    from bridge.sources.live_models.checkpoint_names import live_names

    where = f"{type(model).__name__} in memory"
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise SourceError(
            f"{where}: not a transformers model (it has no config); give a PreTrainedModel, "
            "or its `.module` if it is wrapped for parallel training"
        )
    if not hasattr(model.config, "to_json_string") and not is_diffusion_model(model):
        kind = type(model.config).__name__
        raise SourceError(f"{where}: not a transformers model (its config is a {kind}); give a PreTrainedModel")
    if why := _why_wrapped(model):
        raise SourceError(f"{where}: {why}")
    settled = settle_config(_config(model), config)
    origins = live_names(model)
    problems = []
    if unknown := {name: o.spec.dtype for name, o in origins.items() if o.spec.dtype not in DTYPES}:
        problems.append(f"{named(unknown)}: dtype {', '.join(sorted({*unknown.values()}))} is unknown")
    problems += quantized(None, settled, {name: origin.spec for name, origin in origins.items()})
    if problems:
        raise listed(where, problems)
    return (opened or MemorySource)(model, settled, origins, tokenizer)  # type: ignore[return-value]


def _config(model: Any) -> dict[str, Any]:
    """Return the content of the config.json that `save_pretrained` would write, without its changes to the model."""
    if is_diffusion_model(model):
        return with_architecture(json.loads(model.to_json_string()))
    content: dict[str, Any] = json.loads(model.config.to_json_string())
    return {**content, "architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}


def _why_wrapped(model: Any) -> str:
    """Say why this model has no plain weights (adapters, quantizers); "" if it has."""
    kinds = {type(module).__name__ for module in model.modules()}
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        return "has adapters; give peft's PeftModel, or the adapter's directory with base="
    if "TensorQuantizer" in kinds:
        return "is quantized by ModelOpt already; give the plain model, and the scheme to quant="
    known = {"Params4bit", "Int8Params", "QuantLinear", "WQLinear_GEMM", "Linear4bit", "Linear8bitLt"}
    if getattr(model, "hf_quantizer", None) is not None or kinds & known:
        which = ", ".join(sorted(kinds & known)) or "quantization_config"
        return f"is quantized already ({which}); give the plain model"
    return ""


def values_digest(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], read: Callable[[str], np.ndarray]) -> str:
    """A digest of a config and of the values of all tensors."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, spec in specs.items():
        checksum = zlib.crc32(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
        digest.update(repr((name, spec.shape, spec.dtype, checksum)).encode())
    return digest.hexdigest()


def bits_of(tensor: Any, dtype: str) -> np.ndarray:
    """Return the bits of a torch tensor in NumPy's storage dtype, without a copy if contiguous on the CPU."""
    import torch

    plain = tensor.cpu().contiguous().view(getattr(torch, DTYPES[dtype].storage))
    array: np.ndarray = plain.numpy()
    array.flags.writeable = False  # it may be the caller's own memory
    return array
