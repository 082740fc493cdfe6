"""Statistics of tensors, and of what quantizing them loses."""
