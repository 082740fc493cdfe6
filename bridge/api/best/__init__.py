"""Choose the best rule of a layout, `int4:best`, by measurement."""
