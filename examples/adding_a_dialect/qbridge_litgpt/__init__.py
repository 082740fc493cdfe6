"""Where bridge finds `dialects/litgpt.toml`; it looks for the files and imports nothing"""
