"""What scripts call: one conversion stage by stage, sensitivity."""
