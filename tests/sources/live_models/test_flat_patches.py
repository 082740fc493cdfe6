"""Positions of patches, resized by data, against transformers' loop."""

from __future__ import annotations

import pytest
import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from bridge.sources.live_models.flat_patches import example_patches, reads_patches, resize_by_grid

SIDE, WIDTH = 5, 6
GRIDS = [[5, 5], [1, 1], [3, 8], [9, 2], [1, 30], [4, 7]]  # the table's own, smaller, larger, both


def tower() -> Siglip2VisionModel:
    torch.manual_seed(0)
    return Siglip2VisionModel(
        Siglip2VisionConfig(
            hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_patches=SIDE**2,
            patch_size=2,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_those_of_transformers_for_grids_of_any_form(dtype: torch.dtype) -> None:
    table, grids = torch.randn(SIDE, SIDE, WIDTH, dtype=dtype), torch.tensor(GRIDS)
    want = Siglip2VisionEmbeddings.resize_positional_embeddings(table, grids, 32)
    resize_by_grid(model := tower())
    got = model.embeddings.resize_positional_embeddings(table, grids, max_length=32)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_model_that_resizes_by_data_answers_as_before_and_its_example_runs() -> None:
    model = tower()
    given = example_patches(model, images=2, patches=4, dtype=torch.float32)
    assert reads_patches(model)
    with torch.no_grad():
        want = model(**given).last_hidden_state
        resize_by_grid(model)
        torch.testing.assert_close(model(**given).last_hidden_state, want)
