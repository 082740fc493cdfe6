"""A `transformers` model in memory as a source, in checkpoint names; never changes it, copies no more than is read."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.scratch import scratch
from bridge.sources import loading
from bridge.sources.hf import settle_config
from bridge.sources.live import Origin, computed, live_names, tied_names, without_ties
from bridge.sources.refuse import quantized
from bridge.sources.shards import listed, named
from bridge.values import Program, TensorSpec

WRITTEN_BY = (
    Program(
        "transformers",
        "5.20 and later",
        "names, bytes and configuration are those that `save_pretrained` writes; the model is as it was afterwards",
        ("tests/sources/test_live.py", "tests/sources/test_memory.py"),
    ),
)


class MemorySource:
    """The caller's model: specs and reads are those of what `save_pretrained` would write."""

    dialect = "hf"
    can_run = True
    quantized = None
    calibration = None

    def __init__(self, model: Any, config: dict[str, Any], origins: dict[str, Origin], tokenizer: Any = None) -> None:
        self.where = f"{type(model).__name__} in memory"
        self.name = Path(str(getattr(model, "name_or_path", "") or "")).name or type(model).__name__.lower()
        self.config: Mapping[str, Any] = config
        self.specs: Mapping[str, TensorSpec] = {name: origin.spec for name, origin in origins.items()}
        self.dropped: dict[str, str] = {a: f"tied to {b}" for a, b in sorted(tied_names(model).items())}
        self._model = model
        self._origins = origins
        self._state = without_ties(model, model.state_dict())  # references, no values
        self._tokenizer = tokenizer
        self._last = threading.local()  # the tensor that each thread reads rows of

    @cached_property
    def side_files(self) -> dict[str, Path | bytes]:
        """config.json, generation_config.json and the tokenizer's files, as `transformers` writes them."""
        return _side_files(self._model, dict(self.config), self._tokenizer)

    def read(self, name: str) -> np.ndarray:
        """Return one storage array: read-only, and a view of the model's memory where that is possible."""
        import torch

        origin, state = self._origins[name], self._state
        with torch.no_grad():
            if origin.computed:
                tensor = computed(self._model, origin, state)
            else:
                parts = [part.of(state[part.live]) for part in origin.parts]
                tensor = parts[0] if len(parts) == 1 else torch.cat(parts, origin.axis)
            if tensor.device.type == "meta":
                raise SourceError(f"{name}: has no values (meta device, or offloaded); give its directory instead")
            return _bits(tensor.detach(), origin.spec.dtype)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows of one tensor where they lie; a tensor that has to be put together is, once for all its rows."""
        last = getattr(self._last, "read", None)
        if last is None or last[0] != name or begin == 0:
            last = self._last.read = (name, self.read(name))
        found: np.ndarray = last[1][begin:end]
        if end >= self.specs[name].shape[0]:
            self._last.read = None
        return found

    def place(self, name: str) -> tuple[str, int]:
        """There are no files."""
        return "", 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config and all values: there is no file whose time of change would tell."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for name, spec in self.specs.items():
            checksum = zlib.crc32(np.ascontiguousarray(self.read(name)).reshape(-1).view(np.uint8).data)
            digest.update(repr((name, spec.shape, spec.dtype, checksum)).encode())
        return digest.hexdigest()

    def load_model(self) -> Any:
        """Return the caller's own model, as it is."""
        return self._model

    def load_tokenizer(self) -> Any:
        """Return the given tokenizer, else the one of the directory or hub id that the model was loaded from."""
        origin = str(getattr(self._model, "name_or_path", "") or "")
        return loading.load_tokenizer(self._tokenizer or origin or None, None, self.where)


def recognizes(model: object) -> bool:
    """Take torch modules; where torch was never imported there cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def open_model(model: Any, config: Any = None, tokenizer: Any = None) -> MemorySource:
    """Open a `transformers` model; SourceError where it is another kind of module, quantized, or not in one piece."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    where = f"{type(model).__name__} in memory"
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise SourceError(
            f"{where}: not a transformers model (it has no config); give a PreTrainedModel, "
            "or its `.module` where it is wrapped for parallel training"
        )
    problems = _wrapped(model)
    if problems:
        raise listed(where, problems)
    found = settle_config(_config(model), config)
    origins = live_names(model)
    strange = sorted({o.spec.dtype for o in origins.values() if o.spec.dtype not in DTYPES})
    if strange:
        names = [name for name, o in origins.items() if o.spec.dtype in strange]
        problems.append(f"{named(names)}: dtype {', '.join(strange)} is unknown")
    problems += quantized(None, found, {name: origin.spec for name, origin in origins.items()})
    if problems:
        raise listed(where, problems)
    return MemorySource(model, found, origins, tokenizer)


def _config(model: Any) -> dict[str, Any]:
    """Return the content of the config.json that `save_pretrained` would write, without its changes to the model."""
    found: dict[str, Any] = json.loads(model.config.to_json_string())
    return {**found, "architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}


def _wrapped(model: Any) -> list[str]:
    """Say what stands between this model and plain weights: adapters, quantizers."""
    kinds = {type(module).__name__ for module in model.modules()}
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        return ["carries adapters; merge them first: model = model.merge_and_unload()"]
    if "TensorQuantizer" in kinds:
        return ["is quantized by ModelOpt already; give the plain model, and the scheme to quant="]
    known = {"Params4bit", "Int8Params", "QuantLinear", "WQLinear_GEMM", "Linear4bit", "Linear8bitLt"}
    if getattr(model, "hf_quantizer", None) is not None or kinds & known:
        which = ", ".join(sorted(kinds & known)) or "quantization_config"
        return [f"is quantized already ({which}); give the plain model"]
    return []


def _bits(tensor: Any, dtype: str) -> np.ndarray:
    """Return the bits of a torch tensor as NumPy's storage dtype, without a copy where it is contiguous on the CPU."""
    import torch

    plain = tensor.cpu().contiguous().view(getattr(torch, DTYPES[dtype].storage))
    array: np.ndarray = plain.numpy()
    array.flags.writeable = False  # it may be the caller's own memory
    return array


def _side_files(model: Any, config: dict[str, Any], tokenizer: Any) -> dict[str, Path | bytes]:
    files: dict[str, Path | bytes] = {}
    with scratch() as root:
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(root)
        if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(root)
        for path in sorted(root.rglob("*")):
            if path.is_file():
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return files
