"""Make blocks of the embeddings and heads of tiny models, as they are of large ones."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.calibration.walk.blocks.LEAF", 4096)
