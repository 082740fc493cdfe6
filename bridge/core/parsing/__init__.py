"""Read what users write: JSON and TOML with limits, problems, relative paths."""
