"""Row kernels for the CPU, imported as `bridge._kernels`. No framework, no policy.

Every kernel takes NumPy arrays of bits (bfloat16 as uint16, float32 as uint32), releases the interpreter lock, writes
into arrays of the caller and gives the same bytes on every thread count. `README.md` has the measured rates.
"""
