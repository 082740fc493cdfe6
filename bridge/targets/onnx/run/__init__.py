"""Run written graphs in ONNX Runtime."""
