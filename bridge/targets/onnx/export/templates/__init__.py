"""Float graphs that ship, whose sizes are filled in."""
