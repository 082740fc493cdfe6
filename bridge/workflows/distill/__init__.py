"""Train a model to answer as another one does, through its quantizers if it has any."""

from bridge.workflows.distill.verbs import distill

__all__ = ["distill"]
