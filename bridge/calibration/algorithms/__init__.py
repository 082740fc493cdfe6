"""What AWQ clips, GPTQ and the local Hessian need beside ModelOpt."""
