"""Models whose code counts tokens in Python, against transformers: texts of other lengths than the example's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bridge
from bridge.targets.onnx.run.encoder_decoder import EncoderDecoder
from bridge.targets.onnx.run.runtime import Runtime
from tests.sweep.build import build

TOLERANCE = 2e-5  # see test_export.py


def near(ours: np.ndarray, theirs: torch.Tensor) -> bool:
    wanted = theirs.numpy()
    return ours.shape == wanted.shape and bool(np.abs(ours - wanted).max() < TOLERANCE * np.abs(wanted).max())


@pytest.mark.slow
def test_characters_are_read_in_windows_and_blocks_of_any_number(tmp_path: Path) -> None:
    model = build("CanineForSequenceClassification", torch.float32)  # windows of 16, blocks of 4
    bridge.convert(model, "trt", None, tmp_path / "out", verify=False, progress=False)
    runtime = Runtime(tmp_path / "out")
    for length in (4, 7, 16, 23, 40):
        ids = torch.randint(5, 300, (3, length), generator=torch.Generator().manual_seed(length))
        mask = (torch.arange(length) < torch.tensor([length, length, length // 2])[:, None]).long()
        with torch.no_grad():
            wanted = model(input_ids=ids, attention_mask=mask).logits
        got = runtime.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["logits"]
        assert near(got, wanted), length


@pytest.mark.slow
def test_streams_are_read_at_once_and_token_by_token(tmp_path: Path) -> None:
    """transformers' steps give other logits than its pass: for several rows it gathers the distances of others."""
    model = build("ProphetNetForConditionalGeneration", torch.float32)
    bridge.convert(model, "trt", None, tmp_path / "out", verify=False, progress=False)
    pair = EncoderDecoder(tmp_path / "out")
    ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    tokens = torch.randint(5, 300, (2, 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=tokens).logits
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    assert near(pair.run({**arrays, "decoder_input_ids": tokens.numpy()})["logits"], whole)
    source, past = pair.source(arrays), None
    own: dict[str, np.ndarray] = {}
    for token in tokens.split(1, 1):
        with torch.no_grad():
            out = model(**given, decoder_input_ids=token, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits, own = pair.step(token.numpy(), source, own)
        assert near(logits, out.logits[:, 0])
