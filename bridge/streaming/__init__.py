"""Stage 4: run the steps of a plan under a byte budget."""
