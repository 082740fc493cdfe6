"""What Megatron-Bridge makes of a `model` section, in the process that has its stand-ins."""

from __future__ import annotations

from typing import Any


def made(section: dict[str, Any]) -> dict[str, Any]:
    """The fields of the provider that Megatron-Bridge instantiates, as a section has them."""
    from megatron.bridge.utils.instantiate_utils import instantiate

    provider = instantiate(section)
    found = {name: getattr(provider, name) for name in section if not name.startswith("_")}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if callable(value):
        return {"_target_": f"{value.__module__}.{value.__qualname__}", "_call_": False}
    if type(value).__module__ == "torch":
        return {"_target_": str(value), "_call_": False}
    return list(value) if isinstance(value, tuple) else value
