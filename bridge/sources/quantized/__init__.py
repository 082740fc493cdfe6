"""Checkpoints that are quantized already."""
