"""Names that scripts for Tripy and NeMo call, and DeepSeek's FP8 casts."""
