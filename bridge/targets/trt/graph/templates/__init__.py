"""The old name of `bridge.targets.onnx.export`, for one release."""
