"""Jobs on the API: batch, chain, doctor, prune, distill, golden, inspect, live, load."""
