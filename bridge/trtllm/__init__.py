"""The checkpoint of TensorRT-LLM up to 1.2: one safetensors file a rank, and config.json."""
