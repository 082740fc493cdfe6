"""Make models smaller: fewer channels, heads, experts, layers or tokens."""

from bridge.workflows.prune.search import search
from bridge.workflows.prune.verbs import prune, pruned

__all__ = ["prune", "pruned", "search"]
