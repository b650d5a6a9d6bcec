"""Attention's kernels for CPUs."""
