"""Forms that run on kernels: ours in Triton, and flash-linear-attention's."""
