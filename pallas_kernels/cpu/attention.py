"""Decode attention on a CPU: two passes over a sequence's pages, those of the next tokens on their way from memory meanwhile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray

from pallas_kernels.cpu.calls import (
    LINE,
    argument,
    call,
    compiled,
    inlined,
    kernel,
    pointer,
    prefetch,
    register,
    result,
    result_is_bfloat16,
    rounded,
    share,
    wide,
    words,
)
from pallas_kernels.cpu.math import exponentials
from pallas_kernels.quantized import Pages, Quantized

AHEAD = 2  # pages
BITS: dict[str, Any] = {"bfloat16": np.uint16, "float32": np.float32, "int8": np.int8, "uint8": np.uint8}
HEAD_DIMS = (64, 128)  # for which there is a faster kernel


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """One query a sequence, over all of the sequence's tokens: as `xla.paged_attention_decode`, and exact sums in float32.

    Args:
        q: bfloat16, float16 or float32 [rows, heads, head_dim].
        k_pages, v_pages: bfloat16 or float32 [num_pages, kv_heads, page_size, head_dim], or Quantized; read where the query sees tokens.
        block_tables: int32 [rows, width].
        lengths: int32 [rows].
    """
    name = prepare(k_pages, q.shape[-1])
    k, v = (([pages.values, pages.scale] if isinstance(pages, Quantized) else [pages]) for pages in (k_pages, v_pages))
    options = jnp.array([scale, soft_cap or 0.0, window or 0], jnp.float32)
    queries = q if q.dtype in (jnp.bfloat16, jnp.float32) else q.astype(jnp.float32)
    out: jax.Array = call(name, jax.ShapeDtypeStruct(q.shape, queries.dtype), queries, block_tables, lengths, options, *k, *v)
    return out.astype(q.dtype)


def prepare(k_pages: Pages, head_dim: int) -> str:
    """Register what `paged_attention_decode` calls for such a cache; its name."""
    quantized = isinstance(k_pages, Quantized)
    dtype = str(k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype)
    dim = head_dim if head_dim in HEAD_DIMS else 0
    return register(f"jengine_decode_{dtype}_{dim}", lambda: [_part(BITS[dtype], dim, quantized)])


def _part(stored: Any, dim: int, quantized: bool) -> Any:
    """The function for pages of this dtype, and for one head dim or, if 0, any."""

    @compiled
    def decode(frame: int, part: int, parts: int) -> None:
        (q_data, q_dims), (table_data, table_dims), (length_data, _) = argument(frame, 0), argument(frame, 1), argument(frame, 2)
        second = 6 if quantized else 5
        (k_data, k_dims), (v_data, _), (k_scale, _), (v_scale, _) = (
            argument(frame, 4),
            argument(frame, second),
            argument(frame, 5),
            argument(frame, second + 1 if quantized else second),
        )
        rows, heads, head_dim = words(q_dims, 3)
        num_pages, kv_heads, page_size, _ = words(k_dims, 4)
        width = words(table_dims, 2)[1]
        options = carray(pointer(argument(frame, 3)[0]), 3, np.float32)
        size = dim if dim else head_dim
        numbers = num_pages * kv_heads * page_size * size
        scales = num_pages * kv_heads * page_size if quantized else 0
        out_data, half = result(frame, 0)[0], result_is_bfloat16(frame, 0)
        total = rows * heads * size
        _items(
            (carray(pointer(q_data), 0 if half else total, np.float32), carray(pointer(q_data), total if half else 0, np.uint16)),
            carray(pointer(k_data), numbers, stored),
            carray(pointer(v_data), numbers, stored),
            carray(pointer(k_scale), scales, np.float32),
            carray(pointer(v_scale), scales, np.float32),
            carray(pointer(table_data), rows * width, np.int32),
            carray(pointer(length_data), rows, np.int32),
            (carray(pointer(out_data), 0 if half else total, np.float32), carray(pointer(out_data), total if half else 0, np.uint16)),
            share(rows * kv_heads, part, parts),
            (options[0], options[1]),
            np.int64(options[2]),
            (rows, kv_heads, width, page_size),
            heads // kv_heads,
            size,
            quantized,
        )

    return decode


@inlined
def _items(q, k, v, k_scale, v_scale, tables, lengths, out, items, options, window, shape, group, size, quantized):
    """Items [first, end) of [kv_heads, rows], one after the other. q and out are float32 and bfloat16, of which one is empty."""
    first, end = items
    rows, kv_heads, width, page_size = shape
    if first == end:
        return
    longest = 1
    for item in range(first, end):
        longest = max(longest, lengths[item % rows])
    longest = (longest + page_size - 1) // page_size * page_size
    scores = np.empty(group * longest, np.float32)
    queries, acc = np.empty(group * size, np.float32), np.empty(group * size, np.float32)
    for item in range(first, end):
        head, row = item // rows, item % rows
        length = np.int64(lengths[row])
        start = max(length - window, 0) if window else 0
        base = (row * kv_heads + head) * group * size
        acc[:] = 0
        if length > 0:
            _widen(q, base, queries)
            table = tables[row * width : (row + 1) * width]
            _score(queries, k, k_scale, table, scores, start, length, head, kv_heads, page_size, longest, group, size, quantized)
            _weigh(scores, start, length, longest, group, options)
            if quantized:
                _rescale(scores, v_scale, table, start, length, head, kv_heads, page_size, longest, group)
            _combine(acc, v, table, scores, start, length, head, kv_heads, page_size, longest, group, size)
        _narrow(acc, out, base)


@kernel
def _widen(q, base, queries):
    full, half = q
    for i in range(queries.size):
        queries[i] = wide(half[base + i]) if half.size else full[base + i]


@kernel
def _narrow(acc, out, base):
    full, half = out
    for i in range(acc.size):
        if half.size:
            half[base + i] = rounded(acc[i])
        else:
            full[base + i] = acc[i]


@kernel
def _fetch(pages, page, head, kv_heads, numbers):
    """Begin to read a head's part of a page."""
    base = (page * kv_heads + head) * numbers
    for i in range(0, numbers, LINE // pages.itemsize):
        prefetch(pages, base + i)


@inlined
def _score(q, k, k_scale, table, scores, start, length, head, kv_heads, page_size, longest, group, size, quantized):
    """scores[g * longest + token] of tokens [start, length)."""
    numbers = page_size * size
    last = (length - 1) // page_size
    for index in range(start // page_size, last + 1):
        if index + AHEAD <= last:
            _fetch(k, table[index + AHEAD], head, kv_heads, numbers)
        place = table[index] * kv_heads + head
        page = k[place * numbers : (place + 1) * numbers]
        begin, end = max(start - index * page_size, 0), min(length - index * page_size, page_size)
        for token in range(begin, end):
            key = page[token * size : (token + 1) * size]
            for g in range(group):
                query = q[g * size : (g + 1) * size]
                total = np.float32(0)
                for d in range(size):
                    total += query[d] * wide(key[d])
                if quantized:
                    total *= k_scale[place * page_size + token]
                scores[g * longest + index * page_size + token] = total


@kernel
def _weigh(scores, start, length, longest, group, options):
    """Softmax over each query's scores, scaled and capped."""
    scale, cap = options
    for g in range(group):
        own = scores[g * longest + start : g * longest + length]
        count = length - start
        if cap > 0:  # cap * tanh(s / cap), by exponentials
            for i in range(count):
                own[i] = min(own[i] * (scale * np.float32(2) / cap), np.float32(60))
            exponentials(own, np.float32(0))
            for i in range(count):
                own[i] = cap - cap * np.float32(2) / (own[i] + np.float32(1))
        else:
            for i in range(count):
                own[i] *= scale
        largest = own[0]
        for i in range(count):
            largest = max(largest, own[i])
        exponentials(own, largest)
        total = np.float32(0)
        for i in range(count):
            total += own[i]
        inverse = np.float32(1) / total
        for i in range(count):
            own[i] *= inverse


@kernel
def _rescale(scores, v_scale, table, start, length, head, kv_heads, page_size, longest, group):
    """Each token's weight times its value's scale."""
    for token in range(start, length):
        by = v_scale[(table[token // page_size] * kv_heads + head) * page_size + token % page_size]
        for g in range(group):
            scores[g * longest + token] *= by


@inlined
def _combine(acc, v, table, weights, start, length, head, kv_heads, page_size, longest, group, size):
    """acc[g, d] += the sum of weights[g, token] * v[token, d]."""
    numbers = page_size * size
    last = (length - 1) // page_size
    for index in range(start // page_size, last + 1):
        if index + AHEAD <= last:
            _fetch(v, table[index + AHEAD], head, kv_heads, numbers)
        place = table[index] * kv_heads + head
        page = v[place * numbers : (place + 1) * numbers]
        begin, end = max(start - index * page_size, 0), min(length - index * page_size, page_size)
        fours = begin + (end - begin) // 4 * 4
        for g in range(group):
            own = acc[g * size : (g + 1) * size]
            weight = weights[g * longest + index * page_size : g * longest + (index + 1) * page_size]
            for token in range(begin, fours, 4):
                w0, w1, w2, w3 = weight[token], weight[token + 1], weight[token + 2], weight[token + 3]
                four = page[token * size : (token + 4) * size]
                for d in range(size):
                    own[d] += w0 * wide(four[d]) + w1 * wide(four[size + d]) + w2 * wide(four[2 * size + d]) + w3 * wide(four[3 * size + d])
            for token in range(fours, end):
                w0 = weight[token]
                value = page[token * size : (token + 1) * size]
                for d in range(size):
                    own[d] += w0 * wide(value[d])
