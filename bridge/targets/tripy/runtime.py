"""Run an output: compiled by Tripy, or in the transformers model.

Tripy needs its compiler and an NVIDIA GPU, and a ready module needs a known architecture. If one of them is missing,
the weights run in the transformers model: names, layouts, scales and pre_quant_scale are still verified, and
`substitute` says what is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import BridgeError, CannotRun, VerifyError, first_line
from bridge.targets.tripy.frontend import nvtripy
from bridge.targets.tripy.loading import load
from bridge.targets.tripy.models.build import build


class Runtime:
    """See `bridge.targets.target.Runnable`."""

    def __init__(self, directory: Path) -> None:
        try:
            _need_gpu()
            module = build(directory)
        except BridgeError as error:
            from bridge.targets.hf.runtime import Runtime as Rebuilt

            rebuilt = Rebuilt(directory)
            text = rebuilt.substitute or "its weights in the transformers model"
            self.outputs, self.run = rebuilt.outputs, rebuilt.run
            self.substitute = f"{text} ({first_line(error)})"
            self.model = rebuilt.model
        else:
            try:
                load(directory, module)
            except BridgeError as error:
                raise VerifyError(f"the written model does not load: {error}") from error
            compiled = Compiled(module)
            self.outputs, self.run, self.substitute = compiled.outputs, compiled.run, ""


class Compiled:
    """A loaded `tp.Module`, compiled once for each shape of token ids."""

    def __init__(self, module: Any) -> None:
        self.outputs = ["output 0"]
        self._module = module
        self._inputs = list(inspect.signature(module.forward).parameters)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once; the first output, in float32."""
        from torch.utils.dlpack import from_dlpack

        tp = nvtripy()
        arrays = {name: np.ascontiguousarray(feeds[name], np.int32) for name in self._inputs if name in feeds}
        shapes = tuple((name, array.shape) for name, array in arrays.items())
        if shapes not in self._compiled:
            infos = {name: tp.InputInfo(shape, tp.int32) for name, shape in shapes}
            self._compiled[shapes] = tp.compile(self._module, kwargs=infos)
        inputs = {name: tp.copy(tp.Tensor(array), tp.device("gpu")) for name, array in arrays.items()}
        outputs = self._compiled[shapes](**inputs)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        return {self.outputs[0]: from_dlpack(tp.copy(output, tp.device("cpu"))).float().numpy()}


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise CannotRun("Tripy runs on NVIDIA GPUs, and there is none here")
