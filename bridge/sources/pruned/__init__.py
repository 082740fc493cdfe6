"""Models with fewer channels, heads, experts or layers."""
