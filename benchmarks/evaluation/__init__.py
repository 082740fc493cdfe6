"""What `benchmarks/quality.py` measures with: text, models, peers, readers of written files, figures."""
