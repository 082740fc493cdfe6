"""Find the faults of checkpoints that others wrote, and mend them."""
