"""Run the calls of Transformer Engine's modules by nvdlfw-inspect's own engine, with the features of bridge.

In a process of its own: `python -m tests.oracles.nvdlfw_process FOLDER_OF_LOGS`. It prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix) / "te"  # `make oracles` installs nvdlfw-inspect there
LAYER = "model.0.fc1"
CONFIG: dict[str, Any] = {
    "s": {
        "enabled": True,
        "layers": {"layer_types": ["fc1"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True, "tensors_struct": [{"tensor": "activation", "freq": 2}], "stats": ["max", "numel"],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["mse", "fp8_mse"]},
            "FakeQuant": {
                "enabled": True, "quant_format": "FP8E4M3",
                "gemms_struct": [{"gemm": "fprop", "tensors": ["activation", "weight"]}],
            },
            "DisableFP8GEMM": {"enabled": True, "gemms": ["dgrad"]},
            "DumpTensors": {"enabled": True, "tensors": ["weight"], "high_precision_tensor": True},
        },
    },
    "another": {
        "enabled": True,
        "layers": {"layer_types": ["fc3"]},
        "transformer_engine": {
            "DumpTensors": {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True}
        },
    },
    "wrong": {
        "enabled": True,
        "layers": {"layer_types": ["fc9"]},
        "transformer_engine": {"LogTensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["maxx"]}},
    },
}  # fmt: skip


# A caller's class as it is written for nvdlfw-inspect, in a namespace that is known, as Transformer Engine's is.
OWN = """
from nvdlfw_inspect.registry import Registry, api_method

@Registry.register_namespace_api("own")
class Namespace: ...

@Registry.register_feature(namespace="own")
class Mine:
    @api_method
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, None
"""


class MXFP8Quantizer:
    """By its name: that of Transformer Engine."""


def calls(te: Any, torch: Any) -> dict[str, Any]:
    """The answers to the calls of a module, and to those of another without features."""
    told: dict[str, Any] = {}
    for layer in (LAYER, "model.0.fc2"):
        for gemm in ("fprop", "dgrad", "wgrad"):
            told[f"{layer} {gemm}"] = [
                te.fp8_gemm_enabled(layer_name=layer, gemm=gemm, iteration=0),
                te.modify_tensor_enabled(layer_name=layer, gemm=gemm, tensor_name="weight", iteration=0),
                te.inspect_tensor_postquantize_enabled(layer_name=layer, gemm=gemm, tensor_name="weight", iteration=0),
            ]
        for name in ("activation", "weight", "output"):
            words = {"layer_name": layer, "tensor_name": name}
            told[f"{layer} {name}"] = [te.inspect_tensor_enabled(**words, iteration=step) for step in (0, 1)]
    x = torch.linspace(-3, 4, 64).reshape(2, 32)
    made = te.modify_tensor(
        layer_name=LAYER, gemm="fprop", tensor_name="activation", tensor=x, default_quantizer=None, iteration=0,
        dtype=torch.float32,
    )  # fmt: skip
    told["made"] = made.tolist()
    for layer, name in ((LAYER, "activation"), (LAYER, "weight"), ("model.0.fc3", "activation")):
        te.inspect_tensor(
            layer_name=layer, tensor_name=name, tensor=x, rowwise_quantized_tensor=x, columnwise_quantized_tensor=x,
            quantizer=MXFP8Quantizer(), iteration=0, tp_group=None, tp_size=1,
        )  # fmt: skip
    return told


def own_classes(folder: Path) -> list[str]:
    """What bridge loads of `OWN`, while nvdlfw-inspect's engine is off and its log is not open."""
    from nvdlfw_inspect import logging, registry

    from bridge.workflows.inspect.te.classes import load_features

    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    assert logging.LOGGER is None
    found = [*load_features(folder)]
    assert logging.LOGGER is None
    registry.Registry.data.clear()
    return found


def main() -> None:
    sys.path.insert(0, str(HOME))
    import nvdlfw_inspect.api as debug_api
    import torch
    from nvdlfw_inspect.logging import BaseLogger

    from bridge import dlfw
    from bridge.core.errors import InspectError

    class Mine(BaseLogger):
        def log_scalar(self, name: str, value: float, iteration: int, **_: Any) -> None:
            logged[name, iteration] = value

    logged: dict[tuple[str, int], float] = {}
    told: dict[str, Any] = {"own": own_classes(Path(sys.argv[1], "own"))}
    for run in ("first", "again"):  # the engine is ended and begun again
        logged.clear()
        debug_api.initialize(
            CONFIG, feature_dirs=[dlfw.feature_dir()], log_dir=f"{sys.argv[1]}/{run}", statistics_logger=Mine()
        )
        told[run] = calls(debug_api.transformer_engine, torch)
        debug_api.step()
        told[run]["logged"] = {f"{name} {step}": float(value) for (name, step), value in logged.items()}
        try:
            debug_api.transformer_engine.inspect_tensor_enabled(layer_name="fc9", tensor_name="weight", iteration=0)
        except InspectError as error:
            told[run]["mistake"] = str(error)
        debug_api.end_debug()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
