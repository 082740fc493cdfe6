"""What statistics without a scheme mean: the recipe of Transformer Engine's quantizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bridge.workflows.inspect.collect import Schemes, Under
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.statistics.quantization import BLOCKS, CURRENT, DELAYED, Quantization, of_recipe

# Classes of transformer_engine/pytorch/tensor, by name: nothing of it is imported.
RECIPE_OF = {
    "Float8Quantizer": DELAYED,
    "Float8CurrentScalingQuantizer": CURRENT,
    "Float8BlockQuantizer": BLOCKS,
    "MXFP8Quantizer": "mxfp8",
    "NVFP4Quantizer": "nvfp4",
}
FLOAT8 = {"kFloat8E4M3": "float8_e4m3fn", "kFloat8E5M2": "float8_e5m2"}  # its recipes choose one for each tensor


def recipe_of(quantizer: Any) -> str:
    """The recipe of a quantizer; "" for None and for classes that are not known."""
    kinds = (RECIPE_OF.get(kind.__name__, "") for kind in type(quantizer).__mro__)
    return next(filter(None, kinds), "")


@dataclass(frozen=True)
class CallersSchemes(Schemes):
    """Schemes where modules quantize by themselves. `quantizers`: theirs, by layer and tensor."""

    quantizers: dict[tuple[str, str], Any] = field(default_factory=dict)

    def under(self, name: str, layer: Layer, tensor: str) -> Under | None:
        """None where the module does not quantize the tensor."""
        under = super().under(name, layer, tensor)
        quantizer: Any = self.quantizers.get((layer.name, tensor))
        if under is None or not under.how.static or recipe_of(quantizer) != DELAYED:
            return under
        scale = float(quantizer.scale)  # Transformer Engine multiplies by it
        return replace(under, amax=under.how.bound / scale if scale else None)

    def _quantization(self, name: str, layer: Layer, tensor: str) -> Quantization | None:
        if name or self.session is not None:
            return super()._quantization(name, layer, tensor)
        quantizer = self.quantizers.get((layer.name, tensor))
        if not (recipe := recipe_of(quantizer)):
            return None
        found = of_recipe(recipe, tensor)
        first, *others = found.numeric
        dtype = FLOAT8.get(getattr(getattr(quantizer, "dtype", None), "name", ""), first.dtype)
        return replace(found, numeric=(replace(first, dtype=dtype), *others))
