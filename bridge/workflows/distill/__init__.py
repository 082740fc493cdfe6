"""Train a model to answer as another one does."""

from bridge.workflows.distill.verbs import distill

__all__ = ["distill"]
