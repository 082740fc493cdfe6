"""Live models: from trainers into servers, and from checkpoints into trainers."""
