"""Float graphs of families that ship: their sizes are filled in, without a framework."""
