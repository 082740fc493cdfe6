"""Doors: names that users of other projects already call, opened onto `bridge`; never a second implementation."""
