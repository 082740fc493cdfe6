"""Schemes and recipes: the formats that a model is quantized to."""
