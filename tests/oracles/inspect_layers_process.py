"""Layers that `inspect` finds in live models of Megatron-Core and torchtitan, each program in a process of its own."""

from __future__ import annotations

from typing import Any

from bridge.workflows.inspect.layers import Layer


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
    from bridge.workflows.inspect.layers import layers_of

    shapes = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
    return [(each, shapes[f"{each.module}.{each.parameter}"]) for each in layers_of(model)]


def seen_in_megatron(name: str) -> dict[tuple[int | None, str, str, str], float]:
    """Statistics of that family's model, filled as the checkpoints of `megatron_oracle.family` are."""
    from tests.oracles import megatron_process

    model = megatron_process.filled(name, "local")
    return seen(model, lambda: megatron_process.answer(model, megatron_process._ids()))


def seen_in_torchtitan(name: str, era: str, native: dict[str, Any], ids: Any) -> dict[Any, float]:
    """Statistics of a model with the native tensors of `torchtitan_oracle.family`."""
    import torch

    from tests.oracles import torchtitan_process

    model = torchtitan_process._build(era, name)[0].eval()
    model.load_state_dict({key: torch.from_numpy(array) for key, array in native.items()})
    return seen(model, lambda: model(torch.from_numpy(ids)))


ONE_CONFIG = {
    "all": {
        "enabled": True,
        "layers": {"roles": ["attn.*", "mlp.*"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "output"],
                "stats": ["min", "max", "l1_norm", "l2_norm", "numel"],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["mxfp8_mse"]},
        },
    }
}


def seen(model: Any, run: Any) -> dict[tuple[int | None, str, str, str], float]:
    """Layer number, role, tensor and statistic -> value, of one step under ONE_CONFIG."""
    import torch

    import bridge
    from bridge.workflows.inspect.layers import layers_of

    numbers = {layer.name: layer.number for layer in layers_of(model)}
    with torch.no_grad(), bridge.inspecting(model, ONE_CONFIG) as session:
        run()
        found = session.step()
    return {(numbers[row.layer], row.role, row.tensor, row.stat): row.value for row in found if row.value is not None}
