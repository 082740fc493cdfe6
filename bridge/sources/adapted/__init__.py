"""Models with a LoRA adapter, merged or kept beside."""
