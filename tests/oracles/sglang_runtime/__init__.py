"""SGLang's configs, layers, models and loaders on a CPU, in vLLM's environment, with kernels that stand in."""
