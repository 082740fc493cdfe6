"""Fill a live model with a checkpoint: each process its own part."""
