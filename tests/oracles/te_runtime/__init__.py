"""Stand-ins for Transformer Engine's compiled parts, so that its Python runs on a CPU."""
