"""Tables of dialects: the names and layouts of roles in other checkpoints."""
