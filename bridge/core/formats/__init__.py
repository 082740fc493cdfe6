"""Formats of bytes: safetensors, torch files, DCP, pickles without code."""
