"""Write the files of a target that writes ONNX."""
