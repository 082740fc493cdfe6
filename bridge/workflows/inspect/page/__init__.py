"""The page of an inspection, from its values alone."""

from bridge.workflows.inspect.page.document import page_of, render

__all__ = ["page_of", "render"]
