"""Schemes and recipes, encoding and decoding, calibration files."""
