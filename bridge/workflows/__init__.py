"""Jobs: batch, chain, doctor, prune, distill, golden, inspect, live, load."""
