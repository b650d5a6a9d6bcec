"""A page as bytes, for stores: its arrays one after the other, each as it is on all devices together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jengine.execution.kv_cache import Page


def parts_of(page: Page) -> list[memoryview]:
    """The bytes of a page's arrays. Waits until they are there."""
    leaves = [np.ascontiguousarray(np.asarray(leaf)) for leaf in jax.tree.leaves(page)]
    return [memoryview(leaf.reshape(-1).view(np.uint8)) for leaf in leaves]


def leaves_of(data: bytes, like: Page) -> Sequence[np.ndarray] | None:
    """The arrays of a page with the shapes and dtypes of `like`; None: the number of bytes is wrong."""
    leaves, at = list[np.ndarray](), 0
    abstract = jax.tree.leaves(like)
    if len(data) != sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in abstract):
        return None
    for leaf in abstract:
        count = math.prod(leaf.shape)
        leaves.append(np.frombuffer(data, leaf.dtype, count, at).reshape(leaf.shape))
        at += count * leaf.dtype.itemsize
    return leaves
