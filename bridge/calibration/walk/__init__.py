"""Calibrate a model block by block, within bounded memory."""
