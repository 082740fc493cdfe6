"""Answers of a written model pass the gate of its scheme, or do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bridge.quant.calibration import HeldOut
from bridge.quant.schemes.grammar import Gate
from bridge.quant.schemes.load import load_scheme
from bridge.verification.outputs import error_factor, output_parity


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


@pytest.mark.parametrize(
    ("scheme", "together", "errors"),
    [("int4_awq", 3, math.sqrt(2)), ("int4_awq", 0, 1.0), ("int4_wo", 3, 1.0), ("nvfp4_awq", 2, math.sqrt(2))],
)
def test_mean_pre_scales_are_other_scales_than_those_of_modelopts_model(
    scheme: str, together: int, errors: float
) -> None:
    step = SimpleNamespace(
        site=SimpleNamespace(shares=""),
        format=load_scheme(scheme).format,
        shares="",
        feeds=(),
        unified=("a",) * together,
        coding=SimpleNamespace(bound=""),
    )
    assert error_factor(cast(Any, SimpleNamespace(quantized=(step,)))) == errors
