"""The documentation: pages, and what is made for them of the code."""
