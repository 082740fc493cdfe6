"""Distributed checkpoints as torch, torchtitan and Megatron-Core load them: items, index and steps."""

DISTCP = ".distcp"  # how the names of the files end
