"""File handles and byte ranges, local or remote."""
