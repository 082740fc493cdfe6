"""Output directories: written aside, published by one rename."""
