"""Conversions under other versions of torch, transformers, Python and what servers pin."""
