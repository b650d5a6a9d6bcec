"""Activations, norms and rotary embedding, by XLA or by kernels for CPUs."""
