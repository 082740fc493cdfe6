"""Hooks that see the tensors of layers, and the rows that count."""
