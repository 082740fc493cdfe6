"""Methods in the place of transformers' own, which depend on data."""
