"""The weights of a student: as trained, and as written.

The gradient of what is written goes to the trained weights as it is (straight-through, arXiv 1308.3432): rounding to
the stored dtype and to codes has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.verification.simulated.codes import Codes


class Student:
    """A model whose parameters are what would be written now.

    `model`: of transformers, in float32, this object's own. `stored`: parameter -> its dtype in the checkpoint.
    `codes`: the quantization of its matrices, None without one. `masters`: the trained weights, float32.
    """

    def __init__(self, model: Any, stored: Mapping[str, Any], codes: Codes | None) -> None:
        import torch

        self.model, self.codes, self._stored = model, codes, stored
        self.params: dict[str, Any] = dict(model.named_parameters())
        coded = codes.parameters if codes else frozenset()
        self.masters: dict[str, Tensor] = {
            name: param.detach().clone() if name in coded or stored[name] != torch.float32 else param.data
            for name, param in self.params.items()
        }

    def settle(self) -> None:
        """Let the model run with what would be written of the trained weights."""
        import torch

        with torch.no_grad():
            for name, master in self.masters.items():
                if self.params[name].data_ptr() != master.data_ptr():
                    self.params[name].copy_(master.to(self._stored[name]))
            if self.codes:
                self.codes.apply()

    def trainable(self) -> list[Any]:
        """The trained weights as parameters of an optimizer; their gradients come from `take_gradients`."""
        import torch

        self._leaves = {name: torch.nn.Parameter(master) for name, master in self.masters.items()}
        return list(self._leaves.values())

    def take_gradients(self) -> Iterator[Tensor]:
        """Move the gradients of the model to the trained weights; yield them in order."""
        import torch

        for name, param in self.params.items():
            gradient = param.grad if param.grad is not None else torch.zeros_like(param)
            self._leaves[name].grad, param.grad = gradient, None
            yield gradient

    def written(self) -> Any:
        """The model with trained weights in their stored dtypes; not trainable any more."""
        import torch

        with torch.no_grad():
            for name, param in self.params.items():
                param.data = self.masters[name].to(self._stored[name])
        if self.codes:
            self.codes.remove()
        for name, buffer in self.model.named_buffers():
            if name in self._stored:
                buffer.data = buffer.data.to(self._stored[name])
        return self.model.to("cpu")
