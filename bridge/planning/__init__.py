"""Stage 2: make a plan from source, structure, scheme and target."""
