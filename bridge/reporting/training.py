"""What the page shows of a distillation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bridge.reporting.plots import BOTTOM, HEIGHT, LEFT, MAX_MARKS, WIDTH, Axis, Mark, Plot, Word
from bridge.sources.live_models.distillation import Distillation

DOT = 5


def training_plot(told: Distillation) -> Plot | None:
    """Training losses and held-out KL by step, on a logarithmic scale; None without a loss above zero."""
    losses = [(step, loss) for step, loss in told.losses if loss > 0]
    every = max(1, -(-len(losses) // MAX_MARKS))
    shown, held_out = losses[::every], [(step, kl) for step, kl, _ in told.held_out if kl > 0]
    values = [math.log10(value) for _, value in (*shown, *held_out)]
    if not values:
        return None
    axis = Axis.over(values)
    bottom = HEIGHT - BOTTOM

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 12) * step / max(told.steps, 1)

    def dots(rows: Iterable[tuple[int, float]], kind: str, what: str) -> list[Mark]:
        return [
            Mark(x(step) - DOT / 2, y - DOT / 2, DOT, DOT, f"step {step}: {what} {value:.4g}", kind, DOT)
            for step, value in rows
            for y in [axis.y(math.log10(value))]
        ]

    words = [Word(LEFT - 8, axis.y(tick) + 4, f"{10**tick:.2g}") for tick in axis.ticks()]
    words += [Word(x(step), bottom + 18, f"{step:,}", "middle") for step in _ticks(told.steps)]
    first, last = (f"{rows[at][1]:.4g}" for rows, at in ((losses or held_out, 0), (losses or held_out, -1)))
    return Plot(
        "Loss by step",
        f"The training loss goes from {first} to {last} in {told.steps:,} steps; the scale is logarithmic.",
        HEIGHT,
        axis.lines(),
        words,
        [*dots(shown, "was", "loss"), *dots(held_out, "ok", "KL on text held out")],
        key=(("was", "loss of a step, with that of hidden states"), ("ok", "KL to the teacher on text held out")),
    )


def training_rows(told: Distillation) -> Sequence[tuple[str, ...]]:
    """Step, KL and perplexity of each evaluation."""
    return [(f"{step:,}", f"{kl:.4g}", f"{perplexity:.2f}") for step, kl, perplexity in told.held_out]


def training_words(told: Distillation) -> list[str]:
    """What the figures of the plot do not tell."""
    through = f" through the codes of {told.scheme}" if told.scheme else ""
    cache = f" Its stored answers take {told.cache_bytes:,} bytes." if told.cache_bytes else ""
    return [
        f"{told.steps:,} steps of {told.tokens // max(told.steps, 1):,} tokens{through}, taught by {told.teacher} "
        f"(perplexity {told.teacher_perplexity:.2f}), which ran {told.teacher_share:.0%} of {told.seconds:.0f} s."
        f"{cache}"
    ]


def _ticks(steps: int) -> list[int]:
    return sorted({round(steps * part / 4) for part in range(5)})
