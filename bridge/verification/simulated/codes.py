"""Run a model with the codes that a plan writes of it.

Weights are encoded and decoded as `convert` does, at each step anew; static scales of inputs are of a
calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.dtypes import SEARCHED
from bridge.core.errors import SchemeError
from bridge.core.text import first_of
from bridge.core.values import Structure, TensorSpec
from bridge.planning.plan import Layout, Plan
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array, cast
from bridge.verification.simulated.decoded import Decoded, StoredTensors

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import Origin
    from bridge.sources.source import Source
    from bridge.verification.simulated.inputs import FakeInputs


class Codes:
    """The quantized matrices of a model in memory, whose parameters `apply` replaces by what their codes decode to.

    `params`: live name -> parameter, float32. `specs`: of the checkpoint. `inputs`: hooks that quantize inputs.
    """

    def __init__(
        self,
        plan: Plan,
        calibration: Calibration | None,
        params: Mapping[str, Any],
        origins: Mapping[str, Origin],
        specs: Mapping[str, TensorSpec],
        inputs: FakeInputs,
    ) -> None:
        self._inputs, self._origins, self._params = inputs, origins, params
        self._source = _as_stored(params, origins, specs)
        computed = [name for name in specs if name in origins and origins[name].computed]
        if found := sorted({*computed} & {part.source for step in plan.quantized for part in step.inputs}):
            raise SchemeError(
                f"quant={plan.scheme} cannot be trained through: transformers computes {first_of(found, 2)} from other "
                "tensors"
            )
        self._decoded = Decoded(plan, calibration, self._source, again=True)

    @property
    def parameters(self) -> frozenset[str]:
        """Live names of the parameters that are replaced."""
        return frozenset(part.live for name in self._decoded.names for part in self._origins[name].parts)

    def apply(self) -> None:
        """Replace parameters, which must hold the values as stored, by what their codes decode to."""
        for name, array in self._decoded.tensors().items():
            write_tensor(array, self._origins[name], self._params)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._inputs.remove()


def check_codes(plan: Plan, structure: Structure) -> None:
    """SchemeError for a plan whose codes cannot be made anew at each step."""
    chosen = [s.source for s in plan.quantized if s.format and (s.format.chosen or s.format.weighted)]
    if chosen:
        raise SchemeError(
            f"quant={plan.scheme}: calibration chooses its codes for weights that do not change; train through a "
            "scheme without that algorithm"
        )
    steps = {
        "codes that are searched": [s for s in plan.quantized if s.format and s.format.weight[0].dtype in SEARCHED],
        "experts in one tensor with scales of blocks": [s for s in plan.quantized if s.layout is Layout.EXPERTS],
        "matrices cut for ranks": [s for s in plan.quantized if any(part.inner for part in s.inputs)],
        "a head tied to the embedding": [s for s in plan.quantized if s.site and s.site.weight in structure.tied],
    }
    if problems := [f"{why} ({first_of([s.source for s in some], 2)})" for why, some in steps.items() if some]:
        raise SchemeError(f"quant={plan.scheme} to {plan.target} cannot be trained through: {'; '.join(problems)}")


def write_tensor(array: Array, origin: Origin, params: Mapping[str, Any]) -> None:
    """Write a checkpoint tensor into the live parameters that it comes from."""
    import torch

    at = 0
    for part in origin.parts:
        view = part.of(params[part.live].data)
        if len(origin.parts) == 1:
            view.copy_(torch.from_numpy(array).reshape(view.shape))
            return
        size = view.shape[origin.axis]
        view.copy_(torch.from_numpy(array).narrow(origin.axis, at, size))
        at += size


def _as_stored(params: Mapping[str, Any], origins: Mapping[str, Origin], specs: Mapping[str, TensorSpec]) -> Source:
    """The parameters of a model as the tensors of its checkpoint, in their stored dtypes."""

    def read(name: str) -> Array:
        import torch

        origin, spec = origins[name], specs[name]
        parts = [part.of(params[part.live].data) for part in origin.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, origin.axis)
        return cast(np.ascontiguousarray(whole.cpu().numpy()).reshape(spec.shape), "float32", spec.dtype)

    tensors: Any = StoredTensors(specs, read)
    source: Source = tensors
    return source
