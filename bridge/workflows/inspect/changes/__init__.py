"""Models whose GEMMs take changed operands."""
