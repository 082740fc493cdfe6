"""Whether the code of models in this process is what is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from bridge.core.output.provenance import OPTIONAL, can_change
from bridge.core.version import MODEL_CODE, models_are_as_installed
from bridge.sources.configs.diffusion import is_diffusion

# Of whom modules with models hold functions and classes; any other package means that somebody put them there. This one
# does so in another thread, while that makes a graph.
KNOWN = {
    "bridge", *MODEL_CODE, *(name.replace("-", "_") for name in OPTIONAL), "torch", "huggingface_hub", "jinja2",
    "numpy", "packaging", "PIL", "regex", "requests", "safetensors", "tokenizers", "tqdm", "typing_extensions", "yaml",
    *sys.stdlib_module_names,
} - {"__main__"}  # fmt: skip
NAMED_TUPLE = "namedtuple_"  # how the standard library names the globals of their methods
_AUTO = "transformers.models.auto"


def is_as_installed(
    packages: Iterable[str], config: Mapping[str, Any], transformers_class: Callable[[Any], type]
) -> bool:
    """Return False if the process may hold other code of a model than what is installed.

    That is so if one of `packages` can be edited, if somebody else loaded transformers or diffusers, if a function of
    them was replaced, or if the class of `config` is not their own. A replaced constant is not seen.
    `transformers_class`: the class that is built, by the resolved config of a model that is not of diffusers.
    """
    if can_change(packages) or not models_are_as_installed():
        return False
    if "torch" not in sys.modules or sys.modules.keys().isdisjoint(MODEL_CODE):
        return True  # nobody can have changed it
    try:
        used = _classes(config, transformers_class)
    except Exception:  # whoever builds the model says what is wrong with its config
        return False
    return all(_package(cls.__module__) in MODEL_CODE for cls in used) and not replaced()


def replaced() -> list[str]:
    """Return the functions, methods and classes in loaded modules of model code that are somebody else's."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if _package(name) in MODEL_CODE]
    held = [f"{name}.{path}" for name, module in modules for path, home in _homes(module) if not _is_known(home)]
    return held + list(_registered())


def _classes(config: Mapping[str, Any], transformers_class: Callable[[Any], type]) -> tuple[type, ...]:
    if is_diffusion(config):
        from bridge.sources.live_models.diffusion import diffusion_class

        return (diffusion_class(config),)
    from bridge.sources.live_models.meta_device import resolve_config

    resolved = resolve_config(dict(config))
    return type(resolved), transformers_class(resolved)


def _registered() -> Iterator[str]:
    """Yield what transformers' registries have in place of its own models: a part of a model is looked up there."""
    configs = getattr(sys.modules.get(f"{_AUTO}.configuration_auto"), "CONFIG_MAPPING", None)
    yield from getattr(configs, "_extra_content", {}).keys() & getattr(configs, "_mapping", {}).keys()
    for name, mapping in vars(sys.modules.get(f"{_AUTO}.modeling_auto", object)).items():
        for config in getattr(mapping, "_extra_content", ()):
            if _package(config.__module__) == "transformers":
                yield f"{name}[{config.__name__}]"


def _homes(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, module whose code it is) of what a module and its tables hold: functions, classes, methods."""
    tables = ((name, _entries(value)) for name, value in list(vars(module).items()) if not name.startswith("__"))
    rows = [(f"{name}[{key}]", value) for name, table in tables for key, value in table]
    for name, value in [*vars(module).items(), *rows]:
        if isinstance(value, FunctionType):
            yield name, _home(value)
        elif isinstance(value, type):
            yield name, value.__module__
            if _package(value.__module__) in MODEL_CODE:
                for attribute, member in list(vars(value).items()):
                    yield from ((f"{name}.{attribute}", _home(function)) for function in _functions(member))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """The functions and classes that a table holds by name: of attention, of activations, of rotary embeddings."""
    if hasattr(type(value), "_global_mapping"):  # a registry of transformers
        return [*type(value)._global_mapping.items(), *getattr(value, "_local_mapping", {}).items()]
    entries = list(dict.items(value)) if isinstance(value, dict) else []  # a subclass may build what is asked for
    return [(key, entry[0] if isinstance(entry, tuple) and entry else entry) for key, entry in entries]


def _functions(member: Any) -> Iterator[FunctionType]:
    parts: tuple[object, ...]
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
    else:
        parts = (getattr(member, "__func__", member),)  # of a static or class method
    yield from (part for part in parts if isinstance(part, FunctionType))


def _home(function: FunctionType) -> str:
    """The module that its code was compiled in: a decorator copies the names of what it wraps."""
    return str(function.__globals__.get("__name__", ""))


def _is_known(module: str) -> bool:
    return _package(module) in KNOWN or module.startswith(NAMED_TUPLE)


def _package(module: str) -> str:
    return module.partition(".")[0]
