"""Recurrences over tokens, as loops of ONNX."""
