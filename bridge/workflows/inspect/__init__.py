"""See which layer, tensor and statistic breaks a quantized model."""
