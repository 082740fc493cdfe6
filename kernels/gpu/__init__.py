"""The kernels of `bridge._kernels` for GPUs, in Triton; must never be imported on the way that needs no GPU.

Tensors are torch's, contiguous, on the current device: weights (rows, cols) in bfloat16, float16 or float32, codes as
uint8 or int8. No kernel looks whether a weight is finite: the caller looks at its amax, as on the CPU.

The bits are those of `bridge.quant.reference` evaluated on a CPU, for the same reasons as there and three more:

- `/` of Triton is an approximation on NVIDIA (`div.full.f32`), and torch on CUDA multiplies by the reciprocal where the
  divisor is a Python number: every quotient here is `tl.div_rn`.
- Codes come from integers and one exact addition, as on the CPU, not from casts of the hardware: the same on every
  generation and in Triton's interpreter, whose cast to bfloat16 rounds ties up.
- A NaN loses its sign in a quotient on a GPU: NaN and sign are taken from the weight.

Every launch turns fusion of products and sums off: nothing may round once where the reference rounds twice.
"""
