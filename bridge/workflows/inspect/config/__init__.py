"""Read a config, and resolve it against the layers of a model."""
