"""Run steps in order, each on the output of one before."""

from bridge.workflows.chain.run import chain

__all__ = ["chain"]
