"""Parts of AWQ, GPTQ and the local Hessian that ModelOpt lacks."""
