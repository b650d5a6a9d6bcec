"""Decode attention on a CPU: two passes over a sequence's pages, those of the next tokens on their way from memory meanwhile."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray

from pallas_kernels.cpu.calls import (
    LINE,
    SOURCE,
    argument,
    asked_for_version,
    call,
    handler,
    inlined,
    kernel,
    parts,
    pointer,
    prefetch,
    register,
    result,
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
    rows, heads, head_dim = q.shape
    kv_heads, group = k_pages.shape[1], heads // k_pages.shape[1]
    name = prepare(k_pages, head_dim)
    k, v = (([pages.values, pages.scale] if isinstance(pages, Quantized) else [pages]) for pages in (k_pages, v_pages))
    options = jnp.array([scale, soft_cap or 0.0], jnp.float32)
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, group, head_dim).swapaxes(0, 1)  # an item for each kv head of each row
    items = rows * kv_heads
    pieces: list[jax.Array] = []
    places: list[int] = []
    for part in range(parts()):
        first, end = (items * (part + n) // parts() for n in range(2))
        chosen = jnp.array([first, end, window or 0, part], jnp.int32)  # the last lest calls without items become one
        places += [sum(piece.shape[0] for piece in pieces) + n for n in range(end - first)]
        piece = jax.ShapeDtypeStruct((max(end - first, 1), group, head_dim), jnp.float32)
        pieces.append(call(name, piece, grouped, block_tables, lengths, chosen, options, *k, *v))
    out: jax.Array = jnp.concatenate(pieces)
    out = out if len(places) == out.shape[0] else out[np.array(places)]  # some parts had no item
    return out.reshape(kv_heads, rows, group, head_dim).swapaxes(0, 1).reshape(q.shape).astype(q.dtype)


def prepare(k_pages: Pages, head_dim: int) -> str:
    """Register what `paged_attention_decode` calls for such a cache; its name."""
    quantized = isinstance(k_pages, Quantized)
    dtype = str(k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype)
    dim = head_dim if head_dim in HEAD_DIMS else 0
    return register(f"jengine_decode_{dtype}_{dim}", partial(_handler, BITS[dtype], dim, quantized))


def _handler(stored: Any, dim: int, quantized: bool) -> Any:
    """The function for pages of this dtype, and for one head dim or, if 0, any."""
    source = SOURCE

    @handler
    def decode(frame: int) -> int:
        if asked_for_version(frame, source):
            return 0
        (q_data, q_dims), (table_data, table_dims), (length_data, _) = argument(frame, 0), argument(frame, 1), argument(frame, 2)
        (chosen_data, _), (option_data, _) = argument(frame, 3), argument(frame, 4)
        second = 7 if quantized else 6
        (k_data, k_dims), (v_data, _), (k_scale, _), (v_scale, _) = (
            argument(frame, 5),
            argument(frame, second),
            argument(frame, 6),
            argument(frame, second + 1 if quantized else second),
        )
        kv_heads, rows, group, head_dim = words(q_dims, 4)
        num_pages, _, page_size, _ = words(k_dims, 4)
        width = words(table_dims, 2)[1]
        chosen = carray(pointer(chosen_data), 4, np.int32)
        options = carray(pointer(option_data), 2, np.float32)
        size = dim if dim else head_dim
        numbers = num_pages * kv_heads * page_size * size
        scales = num_pages * kv_heads * page_size if quantized else 0
        _items(
            carray(pointer(q_data), rows * kv_heads * group * size, np.float32),
            carray(pointer(k_data), numbers, stored),
            carray(pointer(v_data), numbers, stored),
            carray(pointer(k_scale), scales, np.float32),
            carray(pointer(v_scale), scales, np.float32),
            carray(pointer(table_data), rows * width, np.int32),
            carray(pointer(length_data), rows, np.int32),
            carray(pointer(result(frame, 0)[0]), max(chosen[1] - chosen[0], 1) * group * size, np.float32),
            (np.int64(chosen[0]), np.int64(chosen[1]), np.int64(chosen[2])),
            (options[0], options[1]),
            (rows, kv_heads, width, page_size),
            group,
            size,
            quantized,
        )
        return 0

    return decode


@inlined
def _items(q, k, v, k_scale, v_scale, tables, lengths, out, chosen, options, shape, group, size, quantized):
    """Items [first, end) of [kv_heads, rows], one after the other."""
    first, end, window = chosen
    rows, kv_heads, width, page_size = shape
    if first == end:
        out[:] = 0
        return
    longest = 1
    for item in range(first, end):
        longest = max(longest, lengths[item % rows])
    longest = (longest + page_size - 1) // page_size * page_size
    scores = np.empty(group * longest, np.float32)
    for item in range(first, end):
        head, row = item // rows, item % rows
        length = np.int64(lengths[row])
        start = max(length - window, 0) if window else 0
        acc = out[(item - first) * group * size : (item - first + 1) * group * size]
        acc[:] = 0
        if length == 0:
            continue
        table = tables[row * width : (row + 1) * width]
        queries = q[item * group * size : (item + 1) * group * size]
        _score(queries, k, k_scale, table, scores, start, length, head, kv_heads, page_size, longest, group, size, quantized)
        _weigh(scores, start, length, longest, group, options)
        if quantized:
            _rescale(scores, v_scale, table, start, length, head, kv_heads, page_size, longest, group)
        _combine(acc, v, table, scores, start, length, head, kv_heads, page_size, longest, group, size)


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
