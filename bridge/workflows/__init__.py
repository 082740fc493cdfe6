"""Jobs built on the API: batch and goldens."""
