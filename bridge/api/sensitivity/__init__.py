"""Measure the cost of quantizing each layer and choose a recipe."""
