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

from importlib import import_module
from typing import Any

__version__ = "0.1.0"  # of the distribution paged-pallas
_MODULES = {  # public names by module, imported on first use; `__init__.pyi` has their types
    "attention.dispatch": ("decode_work", "paged_attention_decode", "paged_attention_prefill"),
    "attention.latent": ("latent_attention_decode", "latent_attention_prefill"),
    "attention.options": ("AttentionOptions",),
    "cache.dispatch": ("copy_pages", "kv_write"),
    "cache.qkv": ("Qkv",),
    "elementwise.rotary": ("Rotation",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
