"""Stage 6: read the output again, compare it, run it."""
