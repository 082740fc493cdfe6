"""Read what users write: JSON and TOML with limits, into dataclasses, all problems at once."""
