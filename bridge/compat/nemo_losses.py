"""Losses of NeMo's distillation over Megatron-Core's tensors [sequence, batch, width].

Each returns ([batch, sequence], whether it must be summed over tensor-parallel ranks, whether its sequence is split).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

Loss = tuple[Tensor, bool, bool]
KEPT = "student_loss"  # under which ModelOpt passes the loss of the student's own labels


class _PerToken(_Loss):
    """`config`: of the student; `projection`: of its hidden states to the teacher's width."""

    def __init__(self, config: Any, projection: nn.Module | None = None) -> None:
        super().__init__()
        self._config, self._projection = config, projection

    def _pair(self, student: Any, teacher: Any) -> tuple[Tensor, Tensor]:
        if isinstance(student, tuple):  # a parallel linear returns its bias beside the output
            student, teacher = student[0], teacher[0]
        return student if self._projection is None else self._projection(student), teacher.detach()


class LogitsKLLoss(_PerToken):
    """KL divergence of the student's logits from the teacher's, both divided by `temperature`, summed over ids.

    There is no factor T^2. The logits of tensor-parallel ranks are parts of the vocabulary.
    """

    def __init__(self, config: Any, temperature: float = 1.0) -> None:
        super().__init__(config)
        self._temperature = temperature

    def forward(self, student: Any, teacher: Any) -> Loss:
        own, theirs = (logits.float() / self._temperature for logits in self._pair(student, teacher))
        if self._config.tensor_model_parallel_size > 1:
            own, theirs = _across_ranks(own), _across_ranks(theirs)
        else:
            own, theirs = own.log_softmax(-1), theirs.log_softmax(-1)
        loss = (theirs.exp() * (theirs - own)).sum(-1)
        return loss.transpose(0, 1).contiguous(), True, False


class HiddenStateCosineLoss(_PerToken):
    """1 - cosine of hidden states that are whole on each rank."""

    def forward(self, student: Any, teacher: Any) -> Loss:
        own, theirs = self._pair(student, teacher)
        loss = 1 - functional.cosine_similarity(own, theirs, dim=-1)
        return loss.transpose(0, 1).contiguous(), False, bool(self._config.sequence_parallel)


class LossBalancer(nn.Module):
    """Weigh hidden losses like the logits', and all of distillation like the student's own loss, unless it is skipped.

    A loss of zero is not divided by: there NeMo raises ZeroDivisionError.
    """

    def __init__(self, kd_loss_scale: float = 1.0, skip_lm_loss: bool = True) -> None:
        super().__init__()
        self._scale, self._skips = kd_loss_scale, skip_lm_loss

    def forward(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        own = losses[KEPT]
        logits = next(loss for name, loss in losses.items() if "Logits" in name)
        hidden = [loss for name, loss in losses.items() if name != KEPT and "Logits" not in name]
        mean = torch.stack(hidden).mean() if hidden else torch.zeros_like(logits)
        total = logits + _as_large_as(mean, logits)
        if not self._skips:
            total = own + _as_large_as(total, own) * self._scale
        return {"kd_loss": total, "logits_loss": logits, "intermediate_loss": mean}


class Projection(nn.Module):
    """The student's hidden states at the teacher's width; as they are if the widths agree."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self._fit: nn.Module = nn.Identity()
        if student.hidden_size != teacher.hidden_size:
            linear = self._fit = nn.Linear(student.hidden_size, teacher.hidden_size)
            student.init_method(linear.weight.data)
            linear.bias.data.zero_()
            for param in linear.parameters():  # Megatron sums their gradients over ranks
                param.sequence_parallel = student.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        fitted: Tensor = self._fit(x)
        return fitted


def _as_large_as(loss: Tensor, other: Tensor) -> Tensor:
    """A loss with the value of another, and its own gradient's direction; as it is if one of them is zero."""
    if not (loss > 0 and other > 0):
        return loss
    return loss * (other.detach() / loss.detach())


def _across_ranks(logits: Tensor) -> Tensor:
    """Log-probabilities of a part of the vocabulary, normalized over all tensor-parallel ranks."""
    from megatron.core import parallel_state
    from torch import distributed
    from torch.distributed.nn import functional as summed

    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.detach().max(-1, keepdim=True).values
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    shifted = logits - largest
    total: Tensor = summed.all_reduce(shifted.exp().sum(-1, keepdim=True), group=group)  # type: ignore[no-untyped-call]
    return shifted - total.log()
