"""Graphs of ONNX for targets `trt` and `ort`: export, quantize, lint and run."""
