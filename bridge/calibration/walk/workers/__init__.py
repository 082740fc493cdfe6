"""Share a calibration between processes."""
