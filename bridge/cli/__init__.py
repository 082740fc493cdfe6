"""The command line: verbs, one table of flags, terminal output."""
