"""Prepare a batch: plans, finished rows, calibrations, memory and disk."""
