"""Tables of architectures: roles, matching against a checkpoint, structure."""
