"""TransformerEngine's debug features: its config language and nvdlfw-inspect's engine."""
