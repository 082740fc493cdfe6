"""The command line: one module per verb, terminal output, options."""
