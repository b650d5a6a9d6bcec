"""Kernels of products for CPUs."""
