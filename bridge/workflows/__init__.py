"""Jobs built on the API: batch, goldens, sensitivity."""
