"""Results of verification: parity per tensor and of outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

OUTPUTS_ASIDE = "outputs were not compared"  # how a line of `Parity.not_run` on them begins
EVALUATION = "the cost was not measured"  # how a line of `Parity.not_run` on it begins
KL = "kl="  # `gate`: begins the most nats a token that a language model may cost, "kl=0.1"
COSINE = "cosine"  # `gate`: for one release, cosine and norm judge language models, too
NO_MODEL = "this conversion built no model; `qbridge verify` runs it"


@dataclass(frozen=True)
class TensorParity:
    """One weight, dequantized from the written file, against its source (both as float32, sums in float64).

    `cosine` and `norm_ratio` (written / source) are both gated: cosine alone misses a dropped scale. `sqnr` is in dB.
    `worst` is the largest relative L2 error of one block of 128 values along `in`. `why`: the gate that failed. `gate`:
    the least cosine, 0 if there is none.
    """

    name: str
    scheme: str
    cosine: float
    norm_ratio: float
    sqnr: float
    worst: float
    passed: bool
    why: str = ""
    gate: float = 0.0

    @property
    def decibels(self) -> float:
        """`sqnr`; infinite if it is 999 (nothing lost) or -999 (nothing left), because a report holds no infinity."""
        return self.sqnr if abs(self.sqnr) < 999 else math.copysign(math.inf, self.sqnr)


@dataclass(frozen=True)
class OutputParity:
    """Outputs of the written model against a reference on held-out batches.

    `reference`: "source" (the unquantized model) or "modelopt" (ModelOpt's fake-quantized one). `relative_l2` is
    |written - reference| / |reference| over `positions` positions; `exact` is the share of positions that agree to
    1e-4: rounding changes single codes, and everything after them differs; a wrong graph agrees nowhere.
    Perplexities are None if the task has none. `why`: the gate that failed.
    """

    reference: str
    positions: int
    cosine: float
    norm_ratio: float
    relative_l2: float
    exact: float
    perplexity: float | None
    reference_perplexity: float | None
    passed: bool
    why: str = ""


@dataclass(frozen=True)
class Evaluation:
    """What a written language model costs on held-out text, against its source.

    `tokens`: positions that were scored, in rows of at most `window`. `kl`: nats a token over the whole vocabulary,
    from the source; `difference`: of the mean next-token losses, written less source. `_error`: their standard errors
    over rows. `agreement`: the share of positions where both predict the same token. `computed`: how it ran. `few`:
    the text has fewer positions than wanted. `text`: which one it is, "" if unknown. `bound`: the most KL that the
    scheme may have, 0 without; `why`: that it has more.
    """

    tokens: int
    window: int
    kl: float
    kl_error: float
    difference: float
    difference_error: float
    agreement: float
    perplexity: float
    source_perplexity: float
    computed: str = ""
    few: bool = False
    text: str = ""
    bound: float = 0.0
    passed: bool = True
    why: str = ""

    def line(self) -> str:
        """Its figures in one line."""
        few = ", all that is held out" if self.few else ""
        several = self.tokens >= self.window  # one row has no spread
        error, change = (f" ± {self.kl_error:.4f}", f" (± {self.difference_error:.1%})") if several else ("", "")
        return (
            f"KL {self.kl:.4f}{error}, perplexity {self.source_perplexity:.2f} -> {self.perplexity:.2f}{change}, same "
            f"token {self.agreement:.1%}; {self.tokens:,} tokens{f' of {self.text}' if self.text else ''}{few}"
        )


@dataclass(frozen=True)
class Count:
    """An invariant, counted: `what` holds for `n` of `of`."""

    what: str
    n: int
    of: int


@dataclass(frozen=True)
class ScaleRange:
    """Weight scales of one kind of tensor: `counts[i]` of the sample lie from 2^(low + i) to twice that."""

    kind: str
    scales: int
    low: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Parity:
    """Parity per tensor and end to end; `passed` if every gate passed. Empty if nothing was compared.

    `not_run`: what could not be run, and why. `substitute`: what was run in place of the file, "" if the file was.
    `evaluation`: what a language model costs, if it was run; else None.
    `ran`: where a part of the figures was measured, if not all were measured in one program.
    """

    tensors: tuple[TensorParity, ...] = ()
    outputs: tuple[OutputParity, ...] = ()
    layers: tuple[tuple[str, float], ...] = ()  # module, relative L2 error of its own output; largest first
    not_run: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    scales: tuple[ScaleRange, ...] = ()
    substitute: str = ""
    ran: str = ""
    evaluation: Evaluation | None = None

    @property
    def faithful(self) -> bool:
        """Whether the file is what the scheme computes."""
        return all(t.passed for t in self.tensors) and all(o.passed for o in self.outputs)

    @property
    def passed(self) -> bool:
        return self.faithful and (self.evaluation is None or self.evaluation.passed)
