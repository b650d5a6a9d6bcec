"""Kernels of products for GPUs of compute capability 9.0."""
