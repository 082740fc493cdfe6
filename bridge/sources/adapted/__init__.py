"""Models with a LoRA adapter, which is merged or copied."""
