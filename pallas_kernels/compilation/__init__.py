"""Compiles kernels for GPUs that are absent, checks the result, shares lowered kernels, and times them."""
