"""Paged attention for JAX: plain functions on arrays, usable without jengine.

A cache is a pair of arrays `[num_pages, kv_heads, page_size, head_dim]`. The tokens of a sequence are in the
pages listed in its row of the block table, in order. Page 0 is the null page: padding is written to it, and
it is never read.

Folders are operations: `attention`, `cache`, `products`, `elementwise`, `recurrence`. In each, `xla` is for
all devices, `cpu` has kernels for CPUs, and kernels for GPUs are named by the generation. An operation's
table (see `targets`) lists its kernels in order of preference: in `attention.dispatch`, `attention.latent`,
`cache.dispatch`, `products.quantize_rows` and the formats of weights, `products.plain`, `eight_bits` and
`four_bits`. `products.weights` multiplies by parameters of any format.
"""
