"""Budgets of bits, bytes or divergence, and `auto:` before one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bridge.core.errors import UsageError
from bridge.core.text import byte_count
from bridge.quant.schemes.load import AUTO

FORMS = 'write "6.5bits" (a weight, on average), "7GB" (all weights) or "kl=0.01" (nats a token)'


@dataclass(frozen=True)
class Budget:
    """`kind`: "bits" (mean of the quantizable weights), "bytes" (of all weights) or "kl" (nats a token)."""

    kind: str
    limit: float
    text: str


def parse_budget(text: str) -> Budget:
    """Parse the text of a budget.

    >>> parse_budget("6.5bits")
    Budget(kind='bits', limit=6.5, text='6.5bits')
    """
    words = re.sub(r"\s", "", str(text)).lower()
    kind, number = "bytes", None
    if match := re.fullmatch(r"kl<?=(.+)", words):
        kind, number = "kl", match[1]
    elif match := re.fullmatch(r"(.+?)bits?", words):
        kind, number = "bits", match[1]
    try:
        if number is None and re.fullmatch(r"[\d.]+", words):
            raise UsageError("a number without a unit")
        limit = float(byte_count(words)) if number is None else float(number)
    except (UsageError, ValueError) as cause:
        raise UsageError(f"budget {text!r} is not valid; {FORMS}") from cause
    if not (math.isfinite(limit) and limit > 0):
        raise UsageError(f"budget {text!r} is not a number above zero; {FORMS}")
    return Budget(kind, limit, str(text))


@dataclass(frozen=True)
class Automatic:
    """`auto:4.8bits:int4_awq,fp8`: a budget, and the schemes to choose from; () for those that the target takes."""

    budget: Budget
    schemes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the chosen scheme, and a part of the name of an output: `auto-4.8bits`."""
        return "auto-" + re.sub(r"<?=|\s", "", self.budget.text.lower())


def is_automatic(quant: object) -> bool:
    """Whether `quant` asks for a choice."""
    return isinstance(quant, str) and quant.startswith(AUTO)


def parse_automatic(text: str) -> Automatic:
    """Parse `auto:BUDGET` or `auto:BUDGET:SCHEME,SCHEME`.

    >>> parse_automatic("auto:4.8bits:int4_awq,fp8").schemes
    ('int4_awq', 'fp8')
    """
    budget, colon, names = text.removeprefix(AUTO).partition(":")
    try:
        parsed = parse_budget(budget)
    except UsageError as cause:
        raise UsageError(f"quant={text!r}: {cause}, as in auto:4.8bits or auto:kl=0.01") from cause
    schemes = tuple(name.strip() for name in names.split(","))
    if colon and not all(schemes):
        raise UsageError(f"quant={text!r}: a scheme's name is missing; write auto:{budget}:int4_awq,fp8, for example")
    return Automatic(parsed, schemes if colon else ())


def choice_notes(recipe: str) -> tuple[str, ...]:
    """What a recipe that `auto:` chose says of its budget and its measured divergence."""
    comments = [line.removeprefix("# ") for line in recipe.splitlines() if line.startswith("# ")]
    return (" ".join(comments[1:]),)
