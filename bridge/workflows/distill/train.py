"""The training loop: AdamW, a cosine, gradients clipped to norm 1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.calibration.reference_outputs import mean_perplexity
from bridge.calibration.walk.workers.processes import Workers, share_of
from bridge.core.errors import TrainingError, warn
from bridge.core.progress import Progress, no_progress
from bridge.workflows.distill.batches import Rows, drawn
from bridge.workflows.distill.head import SplitModel, Trunk, chunks
from bridge.workflows.distill.losses import divergence, hidden_error, next_token_loss
from bridge.workflows.distill.settings import Settings
from bridge.workflows.distill.state import History
from bridge.workflows.distill.student import Student
from bridge.workflows.distill.teacher import LiveReply, Reply, Teacher

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT = "held-out text"  # the text of progress, before the first step and at each evaluation
LARGEST_GRADIENT = 1.0
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of a weight
SHARED = 4 << 20  # values of gradients that processes exchange at once: each holds them some four times
LEAST = 1e-4  # nats a token: a smaller rise is none
NOISE = 1.1  # of the KL on some rows, from one choice of weights to another as good


Pair = tuple[int | None, int | None]  # a student's and a teacher's layer, None after the last norm


@dataclass
class Trainer:
    """A student, its teacher and its optimizer.

    `pairs`: hidden states that are compared; `projection`: of the student's to the teacher's width, None where the
    widths agree. `workers`: processes that share each batch.
    """

    student: Student
    split: SplitModel
    teacher: Teacher
    rows: Rows
    settings: Settings
    vocabulary: int
    pairs: Sequence[Pair]
    projection: Any
    device: Any
    workers: Workers | None = None
    history: History = field(default_factory=History)
    step: int = 0

    def __post_init__(self) -> None:
        import torch

        self._weights = self.student.trainable()
        self._projected: list[Any] = [*self.projection.parameters()] if self.projection else []
        self._optimizer = torch.optim.AdamW([*self._weights, *self._projected], lr=self.settings.lr, weight_decay=0.0)

    def run(self, save: Callable[[Trainer], None], progress: Progress) -> None:
        """Train to the last step; TrainingError for a loss that is not finite, or held-out answers that grew worse."""
        settings = self.settings
        if not self.history.held_out:
            self.evaluate(progress)
        while self.step < settings.steps:
            with self._timed():
                loss = self._one()
            self.history.losses.append((self.step, loss))
            self.step += 1
            progress(self.step, settings.steps, "train")
            if self.step % settings.eval_every == 0 or self.step == settings.steps:
                self.evaluate(progress)
                self._check_better()
            if settings.saves(self.step):
                save(self)

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        names = [*self.student.masters, *(f"projection.{at}" for at in range(len(self._projected)))]
        return zip(names, [*self._weights, *self._projected], strict=True)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step needs."""
        found: dict[str, Tensor] = {}
        for name, weight in self._named_weights():
            state = self._optimizer.state.get(weight, {})
            found[f"weight/{name}"] = weight
            found |= {f"{key}/{name}": state[key] for key in MOMENTS if key in state}
        return found

    def restore(self, step: int, tensors: Mapping[str, Tensor], history: History) -> None:
        """Go on from a state."""
        import torch

        self.step, self.history = step, history
        with torch.no_grad():
            for name, weight in self._named_weights():
                weight.copy_(tensors[f"weight/{name}"])
                keys = [key for key in MOMENTS if f"{key}/{name}" in tensors]
                moved = {key: tensors[f"{key}/{name}"].to("cpu" if key == "step" else weight.device) for key in keys}
                self._optimizer.state[weight] = moved

    def evaluate(self, progress: Progress = no_progress) -> None:
        """Run the held-out rows: KL to the teacher, and perplexity."""
        import torch

        self.student.settle()
        sums = torch.zeros(4, dtype=torch.float64)
        with torch.no_grad(), self._timed():
            for done, row in enumerate(self.rows.held_out):
                progress(done, len(self.rows.held_out), HELD_OUT)
                sums += self._answered(row)
        progress(len(self.rows.held_out), len(self.rows.held_out), HELD_OUT)
        kl, tokens, loss, predicted = sums.tolist()
        if self.rows.held_out:
            found = mean_perplexity([(loss, int(predicted))]) or 0.0
            self.history.held_out.append((self.step, kl / tokens, found))

    def _answered(self, row: int) -> Tensor:
        """Sums over one held-out row: KL, tokens, next-token loss, tokens predicted."""
        import torch

        batch = self.rows.batch([row], self.device)
        ids, mask = batch["input_ids"].flatten(), batch["attention_mask"].flatten()
        kept = mask.nonzero().flatten()
        trunk, reply = self.split.trunk(batch), self._reply([row])
        sums = torch.zeros(4, dtype=torch.float64)
        for part in chunks(len(kept), self.vocabulary):
            at = kept[part]
            logits = self.split.logits(trunk, trunk.last[0][at], ids[at])
            with self._teaching():
                answers = reply.answers(at)
            sums[0] += divergence(logits, answers, self.settings.temperature).double().sum().cpu()
            sums[2:] += torch.tensor(next_token_loss(logits.float().log_softmax(-1), ids, mask, at), dtype=sums.dtype)
        sums[1] += len(kept)
        return sums

    def _one(self) -> float:
        """One step; returns its loss, of the tokens of all processes."""
        import torch

        rows = drawn(self.rows, self.settings, self.step)
        tokens = self.rows.tokens(rows)
        own = [row for _, row in share_of(rows, self.workers)]
        self.student.settle()
        losses = self._backward(own, tokens) if own else torch.zeros(2, dtype=torch.float64)
        total = self._summed({"loss": losses})["loss"]
        loss = float(total.sum())
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {self.step}: the loss is {loss}; a smaller lr= (--lr, now {self.settings.lr:g}) may help, and "
                "begins again (--no-resume)"
            )
        gradients = [*self.student.take_gradients(), *(p.grad for p in self._projected)]
        for parts in pieces(gradients) if self.workers else ():
            for at, total in self._summed({str(at): part for at, part in enumerate(parts)}).items():
                parts[int(at)].copy_(total)
        torch.nn.utils.clip_grad_norm_([*self._weights, *self._projected], LARGEST_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.rate(self.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.history.tokens += tokens
        return loss

    def _backward(self, rows: Sequence[int], tokens: int) -> Tensor:
        """Gradients of the mean over `tokens` of all processes; returns this one's parts of KL and hidden loss."""
        import torch

        batch = self.rows.batch(rows, self.device)
        layers = any(own is not None for own, _ in self.pairs)
        trunk, reply = self.split.trunk(batch, layers), self._reply(rows)
        kept = batch["attention_mask"].flatten().nonzero().flatten()
        hidden = trunk.last.flatten(0, 1)
        leaf, kl = hidden.detach().requires_grad_(), 0.0
        ids = batch["input_ids"].flatten()
        for part in chunks(len(kept), self.vocabulary):
            at = kept[part]
            with self._teaching():
                answers = reply.answers(at)
            loss = divergence(self.split.logits(trunk, leaf[at], ids[at]), answers, self.settings.temperature).sum()
            torch.autograd.backward(loss / tokens)
            kl += float(loss.detach()) / tokens
        errors = [self._hidden_loss(*pair, trunk, reply, kept) / tokens for pair in self.pairs]
        pairs = torch.stack(errors).sum() if errors else torch.zeros((), device=hidden.device)
        balance = self._balance(kl, float(pairs.detach()))
        roots = [(hidden, leaf.grad), *([(pairs * balance, None)] if errors and balance else [])]
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        return torch.tensor([kl, float(pairs.detach()) * balance], dtype=torch.float64)

    def _balance(self, kl: float, pairs: float) -> float:
        """The factor that makes the hidden loss as large as the KL.

        Source: `LogitsAndIntermediatesLossBalancer` of nvidia-modelopt 0.47 (torch/distill/plugins/megatron.py).
        """
        import torch

        if not self.pairs:
            return 0.0
        sums = self._summed({"sums": torch.tensor([kl, pairs], dtype=torch.float64)})["sums"]
        return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0

    def _hidden_loss(
        self, student: int | None, teacher: int | None, trunk: Trunk, reply: Reply, kept: Tensor
    ) -> Tensor:
        own = trunk.last if student is None else trunk.layer(student)
        assert isinstance(reply, LiveReply), "pairs need a teacher that runs"
        with self._teaching():
            theirs = reply.hidden(teacher)
        return hidden_error(own.flatten(0, 1)[kept], theirs[kept], self.projection).sum()

    def _summed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sums over processes, in their order: the same everywhere."""
        if not self.workers:
            return tensors
        total: dict[str, Tensor] = {}
        for theirs in self.workers.exchange(tensors):
            total = {name: total[name] + tensor if total else tensor for name, tensor in theirs.items()}
        return total

    def _check_better(self) -> None:
        """Refuse a student that answers held-out rows clearly worse than before; warn before the last step."""
        if not self.history.held_out or self.step <= self.settings.warm_up:
            return
        (_, before, _), (_, now, _) = self.history.held_out[0], self.history.held_out[-1]
        if now <= before:
            return
        text = (
            f"step {self.step}: KL to the teacher on text held out rose from {before:.4g} to {now:.4g}; a smaller lr= "
            f"(--lr, now {self.settings.lr:g}) or more data may help"
        )
        if self.step == self.settings.steps and not now <= before * NOISE + LEAST:
            raise TrainingError(text)
        if self.workers is None or self.workers.first:
            warn(text)

    def _reply(self, rows: Sequence[int]) -> Reply:
        with self._teaching():
            return self.teacher.reply(rows)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.history.seconds += time.perf_counter() - begin

    @contextmanager
    def _teaching(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.history.teacher_seconds += time.perf_counter() - begin


def pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield views of tensors in order, a list of at most SHARED values at a time."""
    group: list[Tensor] = []
    for tensor in tensors:
        whole = tensor if tensor.ndim else tensor[None]
        rows = max(1, SHARED * len(whole) // max(1, whole.numel()))
        for begin in range(0, len(whole), rows):
            part = whole[begin : begin + rows]
            if group and sum(other.numel() for other in group) + part.numel() > SHARED:
                yield group
                group = []
            group.append(part)
    if group:
        yield group


def pairs_for(settings: Settings, student: Any, teacher: Any, device: Any) -> tuple[Sequence[Pair], Any]:
    """The pairs of hidden states, and a Linear where widths differ; its first weights follow from the seed."""
    import torch

    pairs: Sequence[Pair] = [(None, None)] if isinstance(settings.pairs, str) else settings.pairs
    own, theirs = (int(model.get_output_embeddings().weight.shape[-1]) for model in (student, teacher))
    if not pairs or own == theirs:
        return pairs, None
    with torch.random.fork_rng([]):
        torch.manual_seed(settings.seed)
        return pairs, torch.nn.Linear(own, theirs, bias=False).to(device)
