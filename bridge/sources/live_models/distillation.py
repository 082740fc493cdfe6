"""What a report says of a distillation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Distillation:
    """What a report says of a distillation.

    `losses`: step and training loss. `held_out`: step, KL to the teacher and perplexity on text held out; the first is
    of the student before training. `tokens`: that it was trained on. `teacher_share`: part of `seconds` that the
    teacher ran. `cache_bytes`: of the teacher's stored answers, 0 without. `scheme`: that it was trained through.
    """

    teacher: str
    steps: int
    tokens: int
    seconds: float
    teacher_share: float
    losses: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float, float], ...]
    teacher_perplexity: float
    cache_bytes: int = 0
    scheme: str = ""

    def line(self) -> str:
        """Everything in one line."""
        through = f" through {self.scheme}" if self.scheme else ""
        text = f"{self.steps:,} steps of {self.tokens // max(self.steps, 1):,} tokens{through} in {self.seconds:.0f} s"
        if self.held_out:
            (_, first, before), (_, last, after) = self.held_out[0], self.held_out[-1]
            text += f"; KL {first:.4f} -> {last:.4f}, perplexity {before:.2f} -> {after:.2f} on text held out"
        return f"{text} (teacher {self.teacher_perplexity:.2f})"
