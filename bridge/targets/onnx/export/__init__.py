"""Export an architecture as a float ONNX graph without reading a weight."""
