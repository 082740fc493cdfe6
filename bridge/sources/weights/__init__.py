"""Weight files of all sources: shards, ranks, distributed checkpoints."""
