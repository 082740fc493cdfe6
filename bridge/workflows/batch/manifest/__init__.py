"""Read a manifest (TOML) into rows."""
