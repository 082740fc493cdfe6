"""Run many conversions from one manifest."""
