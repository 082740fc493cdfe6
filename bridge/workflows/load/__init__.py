"""Fill a live model with a checkpoint, each process with its part alone."""
