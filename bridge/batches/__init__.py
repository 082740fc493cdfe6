"""Many conversions from one manifest: `bridge.batch`. Each row is one `bridge.convert`; nothing is converted here."""
