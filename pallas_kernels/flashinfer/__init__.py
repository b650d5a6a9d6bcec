"""FlashInfer's kernels as a second implementation: their CUDA sources, compiled once by nvcc and called by XLA's typed FFI.

Only the sources in the package flashinfer-python are used. It is never imported, and neither is torch, which its own interface needs.
"""
