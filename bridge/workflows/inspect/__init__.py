"""Statistics of tensors, and a quantized model beside its source."""
