"""Facts about single model types (`mappings/model_types.toml`)."""

from __future__ import annotations

from typing import Any

from bridge.core.mappings import mappings, read_table


def names_with(trait: str) -> tuple[str, ...]:
    """Return the model types or classes with a trait, for example `tokenizer_without_file`."""
    return read_table(mappings() / "model_types.toml").words(trait)


def sizes_of(trait: str, model_type: object) -> dict[str, Any] | None:
    """Return the numbers of a model type in a section, for example `cross_attention_image`; None if it has none."""
    section = read_table(mappings() / "model_types.toml").section(trait)
    sizes: dict[str, Any] | None = section.get(str(model_type))
    return sizes
