"""Distributed checkpoints as torch, torchtitan and Megatron-Core load them: items, index and steps."""
