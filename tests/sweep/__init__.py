"""Every family that people deploy, as a tiny random model, through each target and scheme; what came of it."""
