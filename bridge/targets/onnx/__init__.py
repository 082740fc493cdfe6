"""Graphs of ONNX for targets `trt` and `ort`: export, lint, run."""
