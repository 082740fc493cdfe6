"""Transformers models in memory, on the meta device, or loaded from disk."""
