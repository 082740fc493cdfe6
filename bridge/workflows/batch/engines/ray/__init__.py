"""The engine "ray": found by its name, imported by nothing else."""
