"""Kernels for a GPU, written for Triton; the rows of `kernels/` are for the CPU."""
