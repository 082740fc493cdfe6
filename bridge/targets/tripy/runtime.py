"""Runs what target tripy wrote: the ready module, compiled by Tripy, or else its weights in the transformers model.

Tripy needs its compiler and an NVIDIA GPU, and a ready module needs an architecture that is known here. Where one of
them is missing, names, layouts, scales and pre-scales are still proved, and `twin` says what is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError, CannotRun, VerifyError
from bridge.tripy.building import build
from bridge.tripy.frontend import nvtripy
from bridge.tripy.loading import load


class Runtime:
    """See `bridge.verification.Runnable`."""

    def __init__(self, directory: Path) -> None:
        try:
            _need_gpu()
            module = build(directory)
        except BridgeError as error:
            from bridge.unified.runtime import Runtime as Rebuilt

            rebuilt = Rebuilt(directory)
            said = rebuilt.twin or "its weights in the transformers model"
            self.outputs, self.run, self.twin = rebuilt.outputs, rebuilt.run, f"{said} ({str(error).splitlines()[0]})"
            self.model = rebuilt.model
        else:
            try:
                load(directory, module)
            except BridgeError as error:
                raise VerifyError(f"the written model does not load: {error}") from error
            compiled = Compiled(module)
            self.outputs, self.run, self.twin = compiled.outputs, compiled.run, ""


class Compiled:
    """A loaded `tp.Module`, compiled once for every shape of token ids that comes."""

    def __init__(self, module: Any) -> None:
        self.outputs = ["output 0"]
        self._module = module
        self._inputs = list(inspect.signature(module.forward).parameters)
        self._made: dict[tuple[object, ...], Any] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once; the first output, in float32."""
        from torch.utils.dlpack import from_dlpack

        tp = nvtripy()
        given = {name: np.ascontiguousarray(feeds[name], np.int32) for name in self._inputs if name in feeds}
        shapes = tuple((name, array.shape) for name, array in given.items())
        if shapes not in self._made:
            infos = {name: tp.InputInfo(shape, tp.int32) for name, shape in shapes}
            self._made[shapes] = tp.compile(self._module, kwargs=infos)
        inputs = {name: tp.copy(tp.Tensor(array), tp.device("gpu")) for name, array in given.items()}
        found = self._made[shapes](**inputs)
        first = found[0] if isinstance(found, tuple) else found
        return {self.outputs[0]: from_dlpack(tp.copy(first, tp.device("cpu"))).float().numpy()}


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise CannotRun("Tripy runs on NVIDIA GPUs, and there is none here")
