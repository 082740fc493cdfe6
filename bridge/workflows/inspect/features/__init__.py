"""Features of a config that do more than log statistics."""
