"""Models whose residual stream and heads are rotated while they are read."""
