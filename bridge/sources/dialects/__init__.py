"""Open checkpoints of other dialects as Hugging Face tensors."""
