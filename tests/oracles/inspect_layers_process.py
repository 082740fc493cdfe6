"""Layers that `inspect` finds in live models of Megatron-Core and torchtitan, each program in a process of its own."""

from __future__ import annotations

from typing import Any

from bridge.workflows.inspect.config.layers import Layer


def start_megatron(store: str) -> None:
    from tests.oracles import megatron_process

    megatron_process.start(0, 1, 1, store)


def megatron(name: str, spec: str = "te") -> list[tuple[Layer, tuple[int, ...]]]:
    """The layers of one of tests.models.megatron_families, each with the shape of its weight."""
    from tests.models.megatron_families import EVERY
    from tests.oracles import megatron_process

    return _layers(megatron_process.build(EVERY[name], spec))


def start_torchtitan(era: str) -> None:
    from tests.oracles import torchtitan_process

    torchtitan_process.start(era)


def torchtitan(name: str, era: str) -> list[tuple[Layer, tuple[int, ...]]]:
    """The layers of one of tests.models.torchtitan_families."""
    from tests.oracles import torchtitan_process

    return _layers(torchtitan_process._build(era, name)[0])


def _layers(model: Any) -> list[tuple[Layer, tuple[int, ...]]]:
    from bridge.workflows.inspect.config.listing import layers_of

    shapes = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
    return [(each, shapes[f"{each.module}.{each.parameter}"]) for each in layers_of(model)]
