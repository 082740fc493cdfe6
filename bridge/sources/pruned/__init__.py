"""Models with fewer channels, heads, experts, layers or tokens."""
