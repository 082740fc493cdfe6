"""Ready Tripy modules; import all but `build` only after `bridge.targets.tripy.frontend.nvtripy` has succeeded."""
