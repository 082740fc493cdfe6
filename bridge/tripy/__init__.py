"""What quantized Tripy modules load, floats in which Q/DQ finds its codes, and ready modules that load it."""
