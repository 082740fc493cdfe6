"""Run steps one after the other, each on the output of one before: prune, distill, convert."""

from bridge.workflows.chain.run import chain

__all__ = ["chain"]
