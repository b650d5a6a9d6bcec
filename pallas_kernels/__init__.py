"""Paged attention for JAX: plain functions on arrays, usable without jengine.

A cache is a pair of arrays `[num_pages, kv_heads, page_size, head_dim]`; a sequence's tokens lie in the pages that
its row of the block table names, in order. Page 0 is the null page: padding is written there and nothing reads it.
`reference.py` is the truth in float32; `xla.py` is the form that runs on any device; `cpu` has a CPU's kernels, the others are for GPUs;
`dispatch.py` chooses.
"""
