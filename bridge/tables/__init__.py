"""Tables of names: what each tensor of a checkpoint means. Reads TOML and shapes, never a weight, never a framework."""
