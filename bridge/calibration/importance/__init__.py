"""What matters in a model: importance matrices, and scores to prune by."""
