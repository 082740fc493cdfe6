"""What a model without weights keeps of its own: tables that are computed and saved in no checkpoint."""

from __future__ import annotations

import torch
from transformers import MarianConfig, MarianMTModel

from bridge.sources.live_models.meta_device import build_meta, settle_positions


def test_positions_that_no_checkpoint_holds_are_computed() -> None:
    config = MarianConfig(
        vocab_size=40, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=12,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    theirs = MarianMTModel(config).model.decoder.embed_positions.weight
    model = build_meta(config, MarianMTModel, torch.float32)
    settle_positions(model)
    ours = model.model.decoder.embed_positions
    assert torch.equal(ours.weight, theirs)
    assert "weight" not in dict(ours.named_parameters()) and not ours.state_dict()
    assert model.model.decoder.embed_tokens.weight.is_meta
