"""Whatever a config holds, the answer is a routing or an InspectError with a readable message."""

from __future__ import annotations

import copy
import random
from typing import Any

from bridge.core.errors import InspectError
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.te.features import CALLS
from bridge.workflows.inspect.te.resolve import load_routing
from bridge.workflows.inspect.te.where import OwnFeature

LAYERS = tuple(Layer(f"l.{n}.{name}", (role,), n) for n in range(3) for name, role in (("fc2", "mlp.fc2.weight"),))
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 1.5, float("nan"), 10**40, "", "x", "all", "fprop", "weight", "1-2", "fp8_mse", b"x",
    [], [[]], [None], ["weight", 3], [{}], [{"tensor": []}], {}, {"enabled": True}, {1: 2}, {"tensor": "weight"},
    (1, 2), set(),
]  # fmt: skip
CONFIG: dict[str, Any] = {
    "a": {
        "enabled": True,
        "layers": {"layer_types": ["fc"], "layer_numbers": [0, "1-2"], "roles": ["mlp.*"], "modules": ["l.*"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True, "tensors_struct": [{"tensor": "weight", "stats": ["min"], "freq": 2}],
                "start_end_list": [[0, 3], [9, -1]],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["mxfp8_mse_columnwise"]},
            "FakeQuant": {
                "enabled": True, "quant_format": "FP8E4M3",
                "gemms_struct": [
                    {"gemm": "fprop", "tensors": ["weight", "activation"]},
                    {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"}]},
                ],
            },
            "DumpTensors": {"enabled": True, "tensors": "output", "high_precision_tensor": True},
        },
        "LogTensorStats": {"enabled": True, "tensors": ["mine"], "stats": ["min"], "start_end_list": [[1, 2]]},
    },
    "b": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "l.[12]"},
        "bridge": {
            "PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["gradient"]},
            "Mine": {"enabled": True, "gemms_struct": [{"gemm": "dgrad"}], "tensors": ["weight"], "any": {"x": [1]}},
            "DisableFP8Layer": {"enabled": True, "end_step": 7},
        },
    },
}  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


def changed(numbers: random.Random) -> Any:
    """The config with one to three values replaced, removed, or given under another key."""
    config = copy.deepcopy(CONFIG)
    for _ in range(numbers.randint(1, 3)):
        place = numbers.choice(places(config)[1:])
        holder: Any = config
        for key in place[:-1]:
            holder = holder[key]
        kind = numbers.random()
        if kind < 0.7:
            holder[place[-1]] = copy.deepcopy(numbers.choice(VALUES))
        elif kind < 0.85 and isinstance(holder, dict):
            holder[numbers.choice(["tensors", "gemms", "gemms_struct", "stats", 5, None])] = holder.pop(place[-1])
        else:
            del holder[place[-1]]
    return config


def test_any_change_is_read_or_refused_in_words() -> None:
    numbers = random.Random(0)
    own, fp8 = [OwnFeature("Mine", frozenset(CALLS[1:2]))], load_scheme("fp8")
    assert len(load_routing(CONFIG, LAYERS, fp8, own).routes) > 20
    refused = 0
    for _ in range(400):
        config = changed(numbers)
        try:
            routing = load_routing(config, LAYERS, fp8, own)
        except InspectError as error:
            refused += 1
            assert str(error).startswith("config: "), error
            assert " object at 0x" not in str(error)
        else:
            assert routing.next_due(-1) is not None
    assert 200 < refused < 390
