"""From an architecture to its ONNX graph: export, stamping, sites and Q/DQ; never reads a weight."""
