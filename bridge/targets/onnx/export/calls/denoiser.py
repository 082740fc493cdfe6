"""The calling convention of a denoiser's graph: one step, dynamic batch."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch.export import Dim

from bridge.core.errors import ExportError
from bridge.sources.configs.diffusion import PLACES, nested
from bridge.sources.live_models.diffusion_inputs import example_inputs
from bridge.targets.onnx.export.calls.text import BATCH, Axes, Call, Wrapped

OUTPUT = "out_sample"  # diffusers says `sample`, which is an input of a UNet


class _Step(Wrapped):
    """A denoiser that takes tensors by name, also those that it has in dictionaries, and returns its sample."""

    def forward(self, inputs: dict[str, Any], _: list[Any]) -> tuple[Any, ...]:
        return (self.model(**nested(inputs), return_dict=False)[0],)


def denoiser_call(model: Any, mode: Any) -> Call:
    """Return the call of one step. Sizes that a class fixes, in tables of positions, are static."""
    try:
        examples = example_inputs(model, BATCH)
    except ValueError as error:
        raise ExportError(f"{error}; convert it with target `hf`, which needs no graph") from error
    with mode:
        inputs = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in examples.items()}
        output = model(**nested(inputs), return_dict=False)[0]
    dims: dict[str, Any] = {}
    axes = {name: _dynamic(name, tensor, dims) for name, tensor in inputs.items()}
    words: dict[str, Axes] = {
        name: tuple(dim.__name__ if (dim := axes[name].get(at)) else extent for at, extent in enumerate(tensor.shape))
        for name, tensor in inputs.items()
    }
    image = words.get("hidden_states") or words["sample"]
    # the output has the layout of the image, with other channels
    same = len(output.shape) == len(image)
    gives = tuple(image[at] if same and isinstance(image[at], str) else int(n) for at, n in enumerate(output.shape))
    return Call(_Step(model), (inputs, []), (axes, []), words, {OUTPUT: gives})


def _dynamic(name: str, tensor: torch.Tensor, dims: dict[str, Any]) -> dict[int, Any]:
    """The dynamic axes of an input: the rows, and the tokens of the text or of a packed image."""

    def dim(word: str) -> Any:
        # torch guards against one, which concerns its strides alone: the graph holds for one as well
        return dims.setdefault(word, Dim(word, min=2))

    if name in PLACES:
        return {0: dim("image_tokens" if name == "img_ids" else "text_tokens")}
    axes = {0: dim("batch")}
    if name == "encoder_hidden_states":
        axes[1] = dim("text_tokens")
    elif name == "hidden_states" and tensor.ndim == 3:
        axes[1] = dim("image_tokens")
    return axes


def drop_squeezes(model: ir.Model) -> None:
    """Remove each Squeeze of axes that are not one: torch leaves it alone (PixArt), and ONNX refuses it."""
    for node in list(model.graph):
        value, axes = (*node.inputs, None)[:2] if node.op_type == "Squeeze" else (None, None)
        numbers = ir.convenience.get_const_tensor(axes) if axes is not None else None
        if value is None or value.shape is None or numbers is None:
            continue
        extents = [value.shape[int(at)] for at in numbers.numpy().reshape(-1)]
        if all(isinstance(extent, int) and extent != 1 for extent in extents):
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            model.graph.remove(node, safe=True)
