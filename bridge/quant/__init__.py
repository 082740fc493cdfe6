"""Schemes, recipes, calibration and the reference arithmetic; importing this package loads no framework."""
