"""Where bridge finds `arch/arcee.toml`; it looks for the files and imports nothing"""
