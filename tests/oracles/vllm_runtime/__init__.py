"""vLLM's configs, loaders, layers and models on a CPU, in an environment of their own, with kernels that stand in."""
