"""Compiles kernels for GPUs that are absent, and shares lowered ones."""
