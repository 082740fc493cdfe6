"""The functions that scripts call, and one conversion stage by stage."""
