"""FlashInfer's kernels as a second implementation: nvcc compiles their CUDA sources once, and XLA calls them
by its typed FFI.

Only the CUDA sources in the package flashinfer-python are used. Neither the package nor torch, which it
needs, is imported.
"""
