"""Jobs built on the API: batch, chain, doctor, prune, distill, golden, inspect."""
