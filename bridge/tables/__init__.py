"""Map tensor names to roles: expressions, architectures, dialects."""
