"""Config files: config.json of checkpoints that have none, and those of diffusers."""
