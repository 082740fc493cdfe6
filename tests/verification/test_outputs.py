"""Answers of a written model pass the gate of its scheme, or do not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.quant.calibration import HeldOut
from bridge.quant.schemes.grammar import Gate
from bridge.verification.outputs import output_parity


class Answering:
    """A written model that answers what it is told to."""

    substitute = ""

    def __init__(self, answer: np.ndarray) -> None:
        self.outputs, self.answer = ["logits"], answer

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"logits": self.answer}


def test_answers_must_pass_the_gates_cosine_and_both_ends_of_its_norm() -> None:
    wanted, other = np.random.default_rng(5).normal(size=(2, 6, 40))
    other *= np.linalg.norm(wanted) / np.linalg.norm(other)
    turned = wanted + other / 2
    turned *= np.linalg.norm(wanted) / np.linalg.norm(turned)
    held = HeldOut(({},), np.arange(6), np.arange(40), wanted, np.empty((6, 0)))
    gate = Gate(0.98, (0.95, 1.05))
    for answer, passed in ((1.01 * wanted, True), (1.2 * wanted, False), (0.8 * wanted, False), (turned, False)):
        (found,) = output_parity(Answering(answer), held, gate, quantized=True)
        assert found.passed == passed, (found.cosine, found.norm_ratio)
