"""Models in memory that run with the codes of a plan."""
