"""Stage 5: write what a runtime loads, one package per target.

A small target is a module. Imports no framework. An entry point names an object that satisfies `Target`.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import dtype_word
from bridge.core.errors import UsageError
from bridge.core.text import nearest
from bridge.targets.target import Target as Target

if TYPE_CHECKING:
    from bridge.streaming.context import FileSettings

BUILT_IN = ("hf", "megatron", "ort", "torchtitan", "tripy", "trt", "trtllm")
# Programs that users name -> the target whose output they load.
ALIASES = {
    "vllm": "hf", "sglang": "hf", "transformers": "hf", "huggingface": "hf",
    "onnx": "trt", "tensorrt": "trt", "onnxruntime": "ort", "genai": "ort", "onnxruntime-genai": "ort",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the module of a built-in target on first access: `bridge.targets.tripy`."""
    if name not in BUILT_IN:
        raise AttributeError(f"module 'bridge.targets' has no attribute {name!r}")
    return importlib.import_module(f"bridge.targets.{name}")


def target_names() -> list[str]:
    """Names of the built-in targets and of those that entry points add."""
    return sorted({*BUILT_IN, *_added()})


@cache
def _added() -> dict[str, EntryPoint]:
    """Targets of third parties. Cached, since the lookup reads the metadata of every installed package (8 ms)."""
    return {point.name: point for point in entry_points(group="bridge.targets")}


def load_target(name: str) -> Target:
    """Return the target called `name`, or of the program `name`; UsageError lists the known ones and the nearest one.

    >>> load_target("hf").Options().shard_size, load_target("vLLM").name
    ('10GB', 'hf')
    """
    if not isinstance(name, str):
        raise UsageError(f"target takes a name, not {type(name).__name__}; known: {', '.join(target_names())}")
    if name in _added():
        return _added()[name].load()  # type: ignore[no-any-return]
    name = ALIASES.get(name.lower(), name.lower())
    if name not in BUILT_IN:
        raise UsageError(f"target {name!r} is unknown; {nearest(name, [*target_names(), *ALIASES])}")
    return importlib.import_module(f"bridge.targets.{name}").TARGET  # type: ignore[no-any-return]


def file_settings(name: str) -> FileSettings:
    """Header metadata and alignment of the files that target `name` writes."""
    from bridge.streaming.context import FileSettings  # loads numpy

    target = load_target(name)
    return FileSettings(target.metadata, target.align)


def make_options(target: Target, arguments: dict[str, Any]) -> Any:
    """Build the target's options from keyword arguments; UsageError names an unknown one and the nearest known.

    A dtype may be an object with the name of one: `torch.float16`.
    """
    known = {f.name: f for f in dataclasses.fields(target.Options)}
    for name, value in arguments.items():
        if name not in known:
            raise UsageError(f"target {target.name} has no option {name!r}; {nearest(name, known)}")
        if isinstance(known[name].default, bool) and not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: option {name!r} of target {target.name} must be True or False")
    if arguments.get("dtype") is not None and "dtype" in known:
        arguments = arguments | {"dtype": dtype_word(arguments["dtype"])}
    return target.Options(**arguments)
