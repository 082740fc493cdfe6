"""How many tokens a config has room for, by the names of transformers' configs."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.sources.configs.positions import context_length, encoder_length, image_positions


@pytest.mark.parametrize(
    ("config", "writes", "reads"),
    [
        ({"max_position_embeddings": 2048}, 2048, None),
        ({"n_positions": 1024}, 1024, None),
        ({"is_encoder_decoder": True, "max_position_embeddings": 1024}, 1024, 1024),  # BART
        ({"is_encoder_decoder": True, "max_source_positions": 1500, "max_target_positions": 448}, 448, 1500),  # Whisper
        ({"is_encoder_decoder": True, "n_positions": 512}, 512, None),  # T5 has distances
        ({"text_config": {"max_position_embeddings": 77}, "vision_config": {"image_size": 224}}, 77, None),  # CLIP
        ({"is_encoder_decoder": True, "decoder": {"max_position_embeddings": 512}}, 512, None),
        ({"max_position_embeddings": None}, None, None),
    ],
)
def test_positions_are_read_by_each_name(config: dict[str, Any], writes: int | None, reads: int | None) -> None:
    assert (context_length(config), encoder_length(config)) == (writes, reads)


def test_an_image_has_positions_of_all_its_tiles() -> None:
    """560 / 14 patches a side: the shape of Llama 3.2 Vision. config.json may leave out defaults."""
    config = {"model_type": "mllama", "vision_config": {"image_size": 560}}
    assert image_positions(config) == 4 * 1601
    assert image_positions({"model_type": "mllama"}) == 4 * 1025
    assert image_positions({"model_type": "llava", "vision_config": {"image_size": [32, 32]}}) == 0
