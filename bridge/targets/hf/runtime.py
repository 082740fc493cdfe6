"""Runs a written checkpoint dequantized in its `transformers` class; never quantizes activations or the KV cache.

What it proves: names, layouts, scales, pre-scales and folded norms, together. What it leaves out is said in `twin`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.dtypes import from_float32, to_float32
from bridge.errors import BridgeError, CannotRun
from bridge.planning import Output, Plan, Step
from bridge.quant.decode import decode
from bridge.stacks import decode_stack
from bridge.values import TensorSpec
from bridge.written import WrittenTensors


class Rebuilt:
    """The checkpoint that a written one stands for, in the source's names, shapes and dtypes, for `load_model`."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.where = str(directory)
        config = json.loads((directory / "config.json").read_text())
        self.config: Mapping[str, Any] = {key: config[key] for key in config if key != "quantization_config"}
        self._written = WrittenTensors(plan, directory)
        self._steps = {self._name(step): step for step in plan.steps if not step.attention}
        self._sources = plan.sources
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name, step) for name, step in self._steps.items()}

    def read(self, name: str) -> np.ndarray:
        """The storage array of one tensor: as it is in the file, or the values of its codes in the source's dtype."""
        step, spec = self._steps[name], self.specs[name]
        outputs = {output.part: output for output in step.outputs}
        (whole,) = step.inputs
        if step.format:
            shape = spec.shape[::-1] if whole.transposed else spec.shape
            values = self._values(step, outputs, shape)
            return from_float32(np.ascontiguousarray(values.T if whole.transposed else values), spec.dtype)
        array, written = self._written.read(outputs["weight"]), outputs["weight"].spec.dtype
        array = np.ascontiguousarray(array.T) if whole.transposed else array
        return array if written == spec.dtype else from_float32(to_float32(array, written), spec.dtype)

    def _values(self, step: Step, outputs: Mapping[str, Output], shape: tuple[int, ...]) -> np.ndarray:
        """float32, in the axes that were coded; a module's input is not multiplied here, so the weight is, again."""
        assert step.format and step.site
        arrays = {("codes" if part == "weight" else part): self._written.read(out) for part, out in outputs.items()}
        if step.site.stacked:
            return decode_stack(step, arrays, shape)
        layout = "out_in" if step.inputs[0].transposed else step.site.layout
        values = decode(arrays, step.format.weight, shape, layout=layout, transpose=step.transpose, coding=step.coding)
        if "pre_quant_scale" in outputs:
            scale = to_float32(arrays["pre_quant_scale"], outputs["pre_quant_scale"].spec.dtype)
            values = values * (scale[:, None] if layout == "in_out" else scale)
        return values

    @staticmethod
    def _name(step: Step) -> str:
        return step.site.weight if step.site and step.format else step.outputs[0].spec.name

    def _spec(self, name: str, step: Step) -> TensorSpec:
        spec = self._sources[step.source]
        return TensorSpec(name, spec.shape, spec.dtype)


class Runtime:
    """See `bridge.verification.Runnable`."""

    def __init__(self, directory: Path) -> None:
        from bridge.finish import load_manifest

        self.outputs = ["output 0"]
        plan = load_manifest(directory).plan
        try:
            from bridge.quant.answers import runner
            from bridge.sources.loading import load_model

            rebuilt: Any = Rebuilt(directory, plan)  # all of a Source that loading reads
            self.model = load_model(rebuilt)
            self._run = runner(self.model)
        except ImportError as error:
            raise CannotRun(f"running a checkpoint needs torch and transformers: {error}") from error
        except BridgeError as error:
            raise CannotRun(f"the written checkpoint does not load: {error}") from error
        self.twin = "its weights, dequantized, in the transformers model; activations and KV cache are not quantized"
        if not plan.quantized:
            self.twin = ""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once; the first output, in float32. Floats go in in the model's dtype, which torch asks for."""
        import torch

        batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}
        batch = {name: x.to(self.model.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return {self.outputs[0]: self._run(batch).numpy()}
