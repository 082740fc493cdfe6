"""Statistics of tensors, and a quantized model compared with its source."""
