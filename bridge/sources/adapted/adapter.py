"""Tensors and settings of one adapter, from a directory or a PeftModel."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import FLOATS
from bridge.core.errors import SourceError, collected
from bridge.core.files.handles import dead_link
from bridge.core.formats.safetensors import layout
from bridge.core.text import listed, named
from bridge.core.values import TensorSpec
from bridge.sources.adapted.settings import CONFIG, Settings, settings_of
from bridge.sources.config_json import read_json
from bridge.sources.side_files import OWN_TOKENIZER, copied_files
from bridge.sources.weights.shards import open_weights

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_VOCABULARIES = {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"}


@dataclass(frozen=True)
class Adapter:
    """`specs` and `read` have names without peft's `base_model.model.`.

    `half`: peft computes with factors of 16 bits as they are, as in memory; those of a file it widens first.
    `side_files`: its tokenizer, which goes before the base's.
    """

    where: str
    name: str
    settings: Settings
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], np.ndarray]
    read_rows: Callable[[str, int, int], np.ndarray]
    digest: str
    half: bool = False
    root: Path | None = None
    side_files: Mapping[str, Path | bytes] | None = None

    def tensor(self, name: str) -> Any:
        """A torch tensor; a factor is widened as peft widens it."""
        import torch

        from bridge.sources.live_models.loading import as_tensor

        made = as_tensor(np.array(self.read(name)), self.specs[name].dtype)
        narrow = made.dtype in (torch.float16, torch.bfloat16)
        return made.float() if narrow and not self.half else made

    def file(self) -> bytes:
        """The content of adapter_model.safetensors."""
        specs = [TensorSpec(_PREFIX + name, spec.shape, spec.dtype) for name, spec in self.specs.items()]
        head, offsets, _ = layout(specs, {"format": "pt"})
        names = sorted(self.specs, key=lambda name: offsets[_PREFIX + name])
        return b"".join([head, *(np.ascontiguousarray(self.read(name)).tobytes() for name in names)])


def open_adapter(root: Path, where: str) -> Adapter:
    """Open a directory with adapter_config.json; SourceError lists all that is wrong with it."""
    content = read_json(root / CONFIG, f"{where}/{CONFIG}")
    settings, problems = settings_of(content)
    name = next((name for name in WEIGHTS if (root / name).is_file() or dead_link(root / name)), "")
    if not name:
        problems.append(f"no weights: {' or '.join(WEIGHTS)} is missing; get or save the adapter again")
    file = None
    if name:
        with collected(problems, where):
            file = open_weights(root / name)
    if problems or file is None or settings is None:
        raise listed(where, problems)
    specs, wrong = _plain_names(file.specs)
    if wrong:
        raise listed(where, wrong)
    stat = (root / name).stat()
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    digest.update(repr((name, stat.st_size, stat.st_mtime_ns, sorted(file.specs))).encode())
    stored = {plain: stored for stored, plain in zip(file.specs, specs, strict=True)}
    tokenizer = copied_files(
        {name: path for name in OWN_TOKENIZER if (path := root / name).is_file() or dead_link(path)}, where
    )
    return Adapter(
        where, _name(where), settings, specs, lambda name: file.read(stored[name]),
        lambda name, begin, end: file.read_rows(stored[name], begin, end), digest.hexdigest(), root=root,
        side_files=tokenizer if _VOCABULARIES & tokenizer.keys() else {},
    )  # fmt: skip


def live_adapter(where: str, name: str, content: Mapping[str, Any], state: Mapping[str, Any]) -> Adapter:
    """The adapter of a PeftModel, from peft's own state dict of it."""
    from bridge.sources.memory import bits_of, values_digest

    settings, problems = settings_of(content)
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in state.items()}
    given = {key: TensorSpec(key, tuple(tensor.shape), dtypes[key]) for key, tensor in state.items()}
    specs, wrong = _plain_names(given)
    if problems or wrong or settings is None:
        raise listed(where, [*problems, *wrong])
    tensors = {plain: state[key] for key, plain in zip(given, specs, strict=True)}

    def read(name: str) -> np.ndarray:
        return bits_of(tensors[name].detach(), specs[name].dtype)

    return Adapter(
        where, name, settings, specs, read, lambda name, begin, end: read(name)[begin:end],
        values_digest(dict(content), specs, read), half=True, side_files={},
    )  # fmt: skip


def _name(where: str) -> str:
    """A short name for an adapter: the last part of its path or hub id."""
    here = Path(where)
    return (here.resolve().name if here.exists() else where.rstrip("/").split("/")[-1]).split("@")[0]


def _plain_names(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], list[str]]:
    """The specs without peft's prefix, in the same order, and what is wrong with them."""
    problems = []
    if others := [name for name in specs if not name.startswith(_PREFIX)]:
        problems.append(f"{named(others)}: expected names that begin with {_PREFIX!r}, as peft writes them")
    if wrong := [name for name, spec in specs.items() if spec.dtype not in FLOATS]:
        problems.append(f"{named(wrong)}: dtype {specs[wrong[0]].dtype}; expected float32, float16 or bfloat16")
    if not specs:
        problems.append("its file of weights has no tensors; save the adapter again")
    plain = {name.removeprefix(_PREFIX): spec for name, spec in specs.items()}
    return plain, problems


def unwrapped(model: Any) -> tuple[Any, Adapter]:
    """Return a base that shares the caller's tensors, and the active adapter."""
    from peft import get_peft_model_state_dict

    where = f"{type(model).__name__} in memory"
    active = list(model.active_adapters)
    if len(active) != 1:
        raise SourceError(
            f"{where}: {len(active)} adapters are active ({', '.join(active) or 'none'}), and one is merged; "
            "model.set_adapter(...), or combine them: model.add_weighted_adapter(...)"
        )
    merged = [name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)]
    if merged:
        raise SourceError(f"{where}: its adapter is merged into the base already; model.unmerge_adapter() first")
    name = active[0]
    content = model.peft_config[name].to_dict()
    content = {key: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for key, v in content.items()}
    if content.get("peft_type") != "LORA":
        raise SourceError(f"{where}: an adapter of type {content.get('peft_type')}, not LoRA; merge it with peft first")
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    adapter = live_adapter(where, name, content, state)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    base = copy.deepcopy(model, memo).unload()  # of the copy, whose modules are its own and whose tensors are not
    return base, adapter
