"""Stage 3: run the model with ModelOpt and collect amax."""
