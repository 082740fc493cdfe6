"""Expressions of table rows: grammar, ops, shapes, regions."""
