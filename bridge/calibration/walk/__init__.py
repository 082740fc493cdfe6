"""Calibrate a model block by block, so that memory holds one block and the activations between blocks."""
