"""The documentation: pages, and the code that generates parts of them."""
