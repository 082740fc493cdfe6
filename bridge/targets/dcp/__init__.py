"""Shared parts of the targets that write distributed checkpoints: `megatron` and `torchtitan`."""
