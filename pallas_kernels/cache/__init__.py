"""Writes to a paged cache, copies its pages. `dispatch` chooses between `xla` and kernels for GPUs."""
