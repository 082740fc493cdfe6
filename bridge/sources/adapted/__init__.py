"""Models with a LoRA adapter, which is merged into the weights or copied."""
