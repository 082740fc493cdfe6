"""Scores from weights alone: products of norms, from a few rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.sources.opening import open_source
from bridge.sources.pruned import weight_scores
from bridge.sources.pruned.opening import plan_cut
from tests.models.decoder_families import build


def matrices(family: str, model: Any) -> dict[str, torch.Tensor]:
    """The matrices of layer 1, [out, in], by their part."""
    layer = (model.transformer.h if family.startswith("GPT2") else model.model.layers)[1]
    if family.startswith("GPT2"):
        q = layer.attn.c_attn.weight.T[: layer.attn.c_attn.weight.shape[0]]
        return {
            "q": q,
            "o": layer.attn.c_proj.weight.T,
            "up": layer.mlp.c_fc.weight.T,
            "down": layer.mlp.c_proj.weight.T,
        }
    attention, mlp = layer.self_attn, layer.mlp
    if family.startswith("Phi3"):
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        q = attention.qkv_proj.weight[: attention.o_proj.weight.shape[1]]
        return {"q": q, "o": attention.o_proj.weight, "gate": gate, "up": up, "down": mlp.down_proj.weight}
    parts = {"q": attention.q_proj.weight, "o": attention.o_proj.weight}
    return parts | {"gate": mlp.gate_proj.weight, "up": mlp.up_proj.weight, "down": mlp.down_proj.weight}


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"])
def test_scores_are_products_of_norms_from_pieces(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, torch.float32)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    cut = plan_cut(source, {"ffn": 40}, None)
    if not family.startswith("GPT2"):  # no field of its config is the width of a head
        cut = plan_cut(source, {"ffn": 40, "heads": 4}, None)
    most, read_rows = 300, source.read_rows

    def few(name: str, begin: int, end: int, *given: Any) -> np.ndarray:
        assert (end - begin) * source.specs[name].shape[1] <= most
        return read_rows(name, begin, end, *given)

    monkeypatch.setattr(weight_scores, "_PIECE", most)
    monkeypatch.setattr(source, "read", lambda name: pytest.fail(f"{name} was read whole"))
    monkeypatch.setattr(source, "read_rows", few)
    found = weight_scores.weight_scores(cut)
    parts = {name: matrix.detach().double().numpy() for name, matrix in matrices(family, model).items()}
    inner = [parts[name] for name in ("gate", "up") if name in parts]
    wanted = np.prod([np.linalg.norm(matrix, axis=1) for matrix in inner], axis=0) * np.linalg.norm(
        parts["down"], axis=0
    )
    np.testing.assert_allclose(found["ffn"][1, None], wanted, rtol=1e-6)
    if "heads" in found:
        by_head = [parts["q"].reshape(cut.before["heads"], -1), parts["o"].T.reshape(cut.before["heads"], -1)]
        wanted = np.linalg.norm(by_head[0], axis=1) * np.linalg.norm(by_head[1], axis=1)
        np.testing.assert_allclose(found["heads"][1, None], wanted, rtol=1e-6)
