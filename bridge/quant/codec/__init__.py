"""Encode weights to codes and scales, decode and pack them."""
