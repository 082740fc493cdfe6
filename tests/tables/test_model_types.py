"""Facts about single model types are of types and classes that transformers has."""

from __future__ import annotations

import importlib

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from bridge.core.mappings import mappings, read_table
from bridge.sources.configs.positions import image_positions
from bridge.tables.model_types import names_with, sizes_of


def test_every_model_type_and_class_exists() -> None:
    table = read_table(mappings() / "model_types.toml")
    table.known_keys(["tokenizer_without_file", "transposed_experts", "cross_attention_image"])
    assert {*names_with("tokenizer_without_file"), *table.section("cross_attention_image")} <= {*CONFIG_MAPPING_NAMES}
    (name,) = names_with("transposed_experts")
    assert hasattr(importlib.import_module("transformers.models.llama4.modeling_llama4"), name)


@pytest.mark.parametrize(
    ("config", "keys"),
    [({"model_type": "llama"}, 0), ({}, 0), ({"model_type": "mllama"}, 4 * (32 * 32 + 1)),
     ({"model_type": "mllama", "vision_config": {"image_size": 28, "max_num_tiles": 1}}, 5)],
)  # fmt: skip
def test_an_image_has_keys_for_its_patches_and_a_class_of_each_tile(config: dict[str, object], keys: int) -> None:
    assert image_positions(config) == keys


def test_no_caller_changes_the_sizes_of_the_next() -> None:
    sizes = sizes_of("cross_attention_image", "mllama")
    assert sizes
    sizes.clear()
    assert sizes_of("cross_attention_image", "mllama")
