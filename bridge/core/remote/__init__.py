"""Remote models: read by byte range, written by upload, never downloaded whole."""
