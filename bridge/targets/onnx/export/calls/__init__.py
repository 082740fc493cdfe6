"""The calling conventions of graphs: inputs, outputs and dynamic axes."""
