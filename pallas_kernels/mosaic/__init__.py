"""Building blocks of kernels for NVIDIA GPUs, which Pallas's Mosaic backend compiles."""
