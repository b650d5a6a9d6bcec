"""Paged attention for JAX: plain functions on arrays, usable without jengine.

A cache is a pair of arrays `[num_pages, kv_heads, page_size, head_dim]`. The tokens of a sequence are in the
pages listed in its row of the block table, in order. Page 0 is the null page: padding is written to it, and
it is never read. `reference.py` has float32 references for tests, `xla.py` implementations for all devices,
`cpu` kernels for CPUs, and the other files kernels for GPUs. `dispatch.py`, `latent_dispatch.py`,
`product_dispatch.py` and `row_dispatch.py` choose between them. `weights.py` multiplies by parameters of any
format, on any device.
"""
