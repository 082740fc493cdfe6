"""Jobs built on the API: batch, chain, prune, distill, golden, inspect."""
