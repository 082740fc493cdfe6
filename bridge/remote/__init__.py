"""Models that lie elsewhere: read by byte range, written by upload; nothing is ever brought here whole to be read."""
