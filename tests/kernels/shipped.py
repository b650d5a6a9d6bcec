"""Every kernel that ships, with cases that take all of its branches, to be executed by `executed`.

A case is a check of another test file, which compares a kernel with its reference and returns the largest
error. There, the same checks run the form that Pallas interprets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pallas_kernels.attention import blackwell
from pallas_kernels.products import blackwell as products
from pallas_kernels.quantization.formats import FP8_BY_FP8, INT8, WeightFormat
from tests.kernels import (
    test_ampere,
    test_ampere_product,
    test_attention_decode,
    test_attention_prefill,
    test_copy_pages,
    test_grouped_product,
    test_int4_product,
    test_kv_write,
    test_latent_decode,
    test_quantize_rows,
)
from tests.kernels.executed import FEW, MANY
from tests.kernels.test_attention_decode import BOTH, CAP, PLAIN, SINKS, WINDOW
from tests.kernels.test_attention_prefill import LONG
from tools.ptx_machine.schedules import Schedule

E4M3 = "float8_e4m3fn"
INT4, INT4_64 = (WeightFormat("int4", 4, group, offset=True) for group in (128, 64))
MXFP4, NVFP4 = (WeightFormat("e2m1", 4, group) for group in (32, 16))
FP8, FP8_GROUPS, BFLOAT16 = WeightFormat(E4M3, 8), WeightFormat(E4M3, 8, 128), WeightFormat("bfloat16", 16)
INT8_BY_INT8, FP8_BLOCKS = replace(INT8, inputs="int8"), replace(FP8_GROUPS, inputs=E4M3)

Check = Callable[..., float]
Cases = dict[str, dict[str, Check]]  # kernel, name of the case, check: called with a runner

# windows so wide that their sequences are cut, and sinks without a window
WIDE = {"scale": 0.3, "window": 400, "soft_cap": 20.0}
ALONE = {"scale": 0.3, "sinks": True}
FEW_ROWS, MANY_ROWS = (1, 3, 1, 1, 1, 8, 2), (1, 2, 1, 3, 5, 8, 9)  # of sequences
ONE_PAIR = (1, 1, 1, 1, 1, 1, 2)  # items of one row and of two have loops of their own, for up to eight heads

# functions of a check's arguments
decode = partial(partial, test_attention_decode.check)
prefill = partial(partial, test_attention_prefill.check)
latent = partial(partial, test_latent_decode.check)
kv_write = partial(partial, test_kv_write.check)
ampere_write = partial(kv_write, cores=None)
copy_pages = partial(partial, test_copy_pages.check)
ampere_copy = partial(copy_pages, tma=False)
rows = partial(partial, test_quantize_rows.check)
tcgen05 = partial(prefill, kernel=blackwell.paged_attention_prefill)
int4 = partial(partial, test_int4_product.check)
int4_groups = partial(partial, test_int4_product.check_grouped)
grouped = partial(partial, test_grouped_product.check)
eight_bits = partial(partial, test_grouped_product.eight_bits)
inputs_split = partial(partial, test_grouped_product.inputs_split)
scaled_by_group = partial(partial, test_grouped_product.scaled_by_group)
ampere_decode = partial(partial, test_ampere.check_decode)
ampere_prefill = partial(partial, test_ampere.check_prefill)
mma = partial(partial, test_ampere_product.check)
mma_groups = partial(partial, test_ampere_product.check_grouped)
mma_numbers = partial(partial, test_ampere_product.check_every_number)
# by Blackwell's kernel for products
tensor_dense, tensor_groups, tensor_numbers = (
    partial(function, target="b200") for function in (mma, mma_groups, mma_numbers)
)
tensor_sides = partial(eight_bits, least=products.LEAST_ROWS, kernel=products.grouped_product)
tensor_split = partial(inputs_split, kernel=products.grouped_product)

COVERED = 0.75  # kv_write has code for each token of a block, and some of these are padding
# Names of kernels are those in `plgpu.kernel`.
CASES: Cases = {
    "paged_attention_decode": {  # an odd number of blocks: one pair of warpgroups in each
        "head dim 128, group 4": decode(128, 2, 4, 64, 6, "bfloat16", PLAIN, counts=ONE_PAIR),
        "head dim 128, group 8, window, cap": decode(128, 1, 8, 64, 3, "bfloat16", WIDE, counts=ONE_PAIR),
        "head dim 64, group 1, pages of 16, float16": decode(
            64, 1, 1, 16, 2, "float16", PLAIN, longest=330, counts=ONE_PAIR
        ),
        "head dim 64, group 16, pages of 16, sinks, fixed cuts": decode(64, 1, 16, 16, -4, "bfloat16", ALONE),
        "head dim 256, group 7, cap": decode(256, 1, 7, 64, 3, "bfloat16", CAP, longest=330, counts=ONE_PAIR),
        "head dim 128, group 4, int8": decode(
            128, 1, 4, 64, 3, "bfloat16", PLAIN, "int8", longest=330, counts=ONE_PAIR
        ),
        "head dim 64, group 4, pages of 16, window, cap, fp8": decode(
            64, 1, 4, 16, 4, "bfloat16", WIDE, E4M3, counts=ONE_PAIR
        ),
        "head dim 128, group 4, several rows": decode(
            128, 1, 4, 64, 4, "bfloat16", PLAIN, longest=400, counts=FEW_ROWS
        ),
        "head dim 128, group 7, several rows, sinks, fixed cuts": decode(
            128, 1, 7, 64, -3, "bfloat16", ALONE, longest=258, counts=FEW_ROWS
        ),
    },
    "paged_attention_prefill": {
        "head dim 128, group 2": prefill(128, 1, 2, 64, 64, "bfloat16", PLAIN),
        "head dim 64, group 3, pages of 16, sinks": prefill(64, 1, 3, 16, 64, "bfloat16", SINKS),
        "head dim 64, two heads, window, float16": prefill(64, 2, 1, 32, 64, "float16", LONG),
        "head dim 256, group 5, tiles of 16, window, cap": prefill(256, 1, 5, 64, 16, "bfloat16", BOTH),
        "head dim 128, group 4, tiles of 8, int8": prefill(128, 1, 4, 64, 8, "bfloat16", CAP, "int8"),
        "head dim 64, pages of 32, window, fp8": prefill(64, 1, 2, 32, 64, "bfloat16", WINDOW, E4M3),
    },
    "latent_attention_decode": {
        "rank 512, 16 heads": latent(512, 64, 16, 64, 3, "bfloat16", longest=330),
        "rank 128, 128 heads, pages of 16, float16": latent(128, 64, 128, 16, 5, "float16", longest=330),
        "rank 256, 20 heads, pages of 32, fixed cuts": latent(256, 64, 20, 32, -4, "bfloat16", longest=330),
    },
    "kv_write": {
        "rotated, two groups of tokens": kv_write(None, "bfloat16", 128, 2, 2, 16, 13, 64, ""),
        "plain, float16": kv_write(None, "float16", 64, 1, 3, 64, 5, 0, ""),
        "normed, rotated by XLA": kv_write(None, "bfloat16", 64, 3, 1, 32, 8, 24, "norm"),
        "normed, rotated in part, int8": kv_write("int8", "bfloat16", 128, 1, 2, 16, 9, 32, "norm"),
        "normed, rotated, head dim 256, fp8": kv_write(E4M3, "bfloat16", 256, 1, 1, 32, 3, 128, "gemma"),
        "one token, rotated": kv_write(None, "bfloat16", 128, 2, 1, 16, 1, 64, "apart"),
        "two heads a block": kv_write(None, "bfloat16", 64, 2, 4, 64, 13, 32, "norm", cores=1),
        "two heads a block, int8": kv_write("int8", "bfloat16", 64, 2, 4, 64, 13, 32, "", cores=1),
    },
    "copy_pages": {
        "bfloat16": copy_pages(None, "bfloat16", 128, 2, 16),
        "int8": copy_pages("int8", "float16", 64, 1, 128),
        "fp8": copy_pages(E4M3, "bfloat16", 256, 1, 32),
    },
    "quantize_rows": {
        "summed, normed, fp8": rows(E4M3, "bfloat16", True, True, None, 3, 640),
        "gated, int8": rows("int8", "bfloat16", False, False, "silu", 2, 384),
        "normed, fp8, float16": rows(E4M3, "float16", False, True, None, 3, 128),
        "float32, int8": rows("int8", "float32", False, False, None, 5, 384),
        "by group, gated": rows(E4M3, "bfloat16", False, False, "silu", 3, 512, by_group=True),
        "by group, summed, normed": rows(E4M3, "bfloat16", True, True, None, 3, 384, by_group=True),
    },
    "grouped_product": {
        "bfloat16": grouped("", "bfloat16", (3, 0, 5, 1), 128, 128),
        "int8": grouped("int8", "bfloat16", (0, 20, 0, 1), 64, 192),
        "fp8, float16": grouped(E4M3, "float16", (0, 0, 64), 192, 128),
        "both fp8": eight_bits(E4M3, 5, 64, 512),
        "both int8": eight_bits("int8", 20, 128, 192),
        "both fp8 by group, 8 rows": eight_bits(E4M3, 8, 64, 512, by_group=True),
        "both fp8 by group, 64 rows": eight_bits(E4M3, 64, 64, 256, by_group=True),
        "int8, inputs split": inputs_split("int8", 3, 64, 2560, 2),
        "scales by group of inputs, split": scaled_by_group((0, 3), 2),
        "experts, both fp8 by group": scaled_by_group((20, 0, 9), inputs=True),
    },
    "int4_product": {
        "9 rows, offsets": int4(9, 128, 640, 128, True, "int4", "bfloat16"),
        "33 rows, groups of 32": int4(33, 64, 1152, 32, True, "int4", "bfloat16"),
        "8 rows, groups of 32, no offsets": int4(8, 64, 1408, 32, False, "int4", "bfloat16"),
        "9 rows, float16, offsets": int4(9, 64, 640, 128, True, "int4", "float16"),
        "MXFP4, inputs split": int4(3, 64, 96, 32, False, "e2m1", "bfloat16"),
        "MXFP4, 64 rows, an odd number of tiles": int4(64, 64, 1408, 32, False, "e2m1", "bfloat16"),
        "experts, MXFP4": int4_groups((3, 0, 9), 64, 160, 32, False, "e2m1", "bfloat16"),
    },
}
# In long tests only.
MORE: Cases = {
    "paged_attention_decode": {
        f"head dim {size}, group {group}, pages of {page}, {kind or dtype}, {name}": decode(
            size, 2, group, page, blocks, dtype, ways, kind or None
        )
        for size, group, page, blocks, dtype, kind, name, ways in (
            (64, 4, 64, 6, "float16", "", "window", WINDOW),
            (64, 8, 128, 7, "bfloat16", "int8", "sinks", SINKS),
            (64, 7, 32, -4, "bfloat16", E4M3, "window, cap", BOTH),
            (128, 1, 128, 5, "float16", "", "cap", CAP),
            (128, 7, 16, 4, "bfloat16", "", "window", WINDOW),
            (128, 16, 64, -3, "bfloat16", "", "sinks", SINKS),
            (128, 8, 16, 3, "bfloat16", "int8", "window, cap", BOTH),
            (128, 4, 64, 4, "float16", E4M3, "plain", PLAIN),
            (128, 32, 64, 4, "bfloat16", "", "plain", PLAIN),
            (256, 1, 64, 4, "float16", "", "sinks", SINKS),
            (256, 4, 16, 3, "bfloat16", "", "window", WINDOW),
            (256, 8, 32, 2, "float16", E4M3, "window", WINDOW),
            (256, 16, 128, 3, "bfloat16", "int8", "window, cap", BOTH),
        )
    }
    | {
        f"head dim {size}, {heads} heads, group {group}, {kind or dtype}, many rows, {name}": decode(
            size, heads, group, 64, blocks, dtype, ways, kind or None, counts=MANY_ROWS, alone=blocks < 0
        )
        for size, heads, group, blocks, dtype, kind, name, ways in (
            (128, 8, 4, 12, "bfloat16", "", "plain", PLAIN),  # Llama 3
            (128, 4, 7, -6, "bfloat16", "", "plain", PLAIN),  # Qwen 2
            (64, 1, 8, 4, "bfloat16", "", "window, cap, sinks", {**WIDE, "sinks": True}),
            (128, 1, 12, -4, "float16", "", "window", WINDOW),
            (256, 1, 32, 3, "bfloat16", "", "cap", CAP),
            (64, 2, 1, 5, "bfloat16", "int8", "window", WINDOW),
            (128, 1, 5, 4, "bfloat16", E4M3, "sinks", SINKS),
            (256, 1, 4, -3, "float16", "int8", "window, cap", BOTH),
        )
    },
    "paged_attention_prefill": {
        f"head dim {size}, group {group}, tiles of {tile}, pages of {page}, {kind or dtype}, {name}": prefill(
            size, 1, group, page, tile, dtype, ways, kind or None
        )
        for size, group, tile, page, dtype, kind, name, ways in (
            (64, 1, 128, 64, "float16", "", "window, cap", BOTH),
            (64, 9, 16, 192, "bfloat16", "int8", "sinks", SINKS),
            (128, 3, 48, 16, "bfloat16", E4M3, "window, cap", BOTH),
            (128, 1, 64, 64, "bfloat16", "", "sinks", SINKS),
            (128, 2, 64, 64, "float16", "int8", "window", WINDOW),
            (256, 2, 64, 16, "bfloat16", "", "long window", LONG),
            (256, 1, 64, 64, "bfloat16", "int8", "cap", CAP),
            (256, 3, 48, 32, "float16", E4M3, "plain", PLAIN),
        )
    },
    "latent_attention_decode": {
        "rank 512, 64 heads, pages of 16": latent(512, 64, 64, 16, 4, "bfloat16"),
        "rank 384, 1 head": latent(384, 64, 1, 128, 2, "float16"),
    },
    "grouped_product": {
        "160 rows": grouped("", "bfloat16", (100, 1, 0, 0, 60), 384, 128),
        "float16": grouped("", "float16", (0, 20, 0, 1), 64, 320),
        "int8, float16": grouped("int8", "float16", (9, 8, 0, 7, 1), 128, 512),
        "both int8, inputs split": eight_bits("int8", 9, 64, 512, 2),
        "fp8, inputs split": inputs_split(E4M3, 20, 128, 384, 3),
        "fp8, 16 rows, inputs split": inputs_split(E4M3, 16, 64, 2560, 2),
        "scales by group of inputs, 29 rows": scaled_by_group((20, 0, 9)),
        "both fp8 by group, 130 rows, split": eight_bits(E4M3, 130, 128, 512, 2, by_group=True),
        "experts, int8 by int8": mma_groups((2, 0, 5), 64, 256, INT8_BY_INT8, "bfloat16", target="h200"),
        "experts, fp8 by fp8": mma_groups((2, 0, 5), 64, 256, FP8_BY_FP8, "bfloat16", target="h200"),
        "experts, both fp8 by group, split": scaled_by_group((0, 64, 3), 2, inputs=True),
    },
    "quantize_rows": {
        "by group, two groups": rows(E4M3, "float16", False, False, None, 2, 256, by_group=True),
        "by group, 5120 numbers": rows(E4M3, "bfloat16", False, True, None, 2, 5120, by_group=True),
    },
    "int4_product": {
        "20 rows, inputs split": int4(20, 64, 2304, 128, False, "int4", "float16"),
        "130 rows, groups of 64": int4(130, 128, 320, 64, True, "int4", "bfloat16"),
        "64 rows, groups of 64": int4(64, 192, 576, 64, False, "int4", "bfloat16"),
        "130 rows, groups of 128": int4(130, 64, 1152, 128, False, "int4", "bfloat16"),
        "33 rows, float16, offsets": int4(33, 64, 576, 64, True, "int4", "float16"),
        "MXFP4, float16": int4(9, 128, 640, 32, False, "e2m1", "float16"),
        "MXFP4, 130 rows": int4(130, 128, 1152, 32, False, "e2m1", "bfloat16"),
        "MXFP4, 8 rows, inputs split": int4(8, 192, 4224, 32, False, "e2m1", "bfloat16"),
        "experts, offsets": int4_groups((0, 70, 0, 1), 64, 640, 128, True, "int4", "bfloat16"),
    },
    "kv_write": {
        f"{kind or dtype}, head dim {size}, {heads} heads, {tokens} tokens, {pairs} pairs": kv_write(
            kind, dtype, size, heads, 2, 16, tokens, pairs, how, cores=cores
        )
        for kind, dtype, size, heads, tokens, pairs, how, cores in (
            (None, "float16", 256, 2, 27, 32, "norm", 1),
            ("int8", "float16", 256, 3, 27, 32, "gemma", 132),
            (E4M3, "bfloat16", 128, 2, 27, 64, "norm", 1),
            (E4M3, "bfloat16", 64, 5, 8, 0, "norm", 132),
        )
    },
}
# For Ampere and Ada.
AMPERE: Cases = {
    "paged_attention": {
        "decode, head dim 64, group 4": ampere_decode(64, 1, 4, 64, None, "bfloat16", PLAIN),
        "decode, head dim 64, pages of 16, sinks": ampere_decode(64, 1, 4, 16, 1, "bfloat16", SINKS),
        "decode, head dim 128, group 9, three splits, window, cap": ampere_decode(
            128, 1, 9, 128, 3, "float16", BOTH
        ),
        "decode, head dim 256, cap": ampere_decode(256, 1, 4, 16, 1, "bfloat16", CAP),
        "prefill, head dim 64, two splits, window": ampere_prefill(64, 1, 3, 16, 2, "bfloat16", WINDOW),
        "decode, int8, head dim 128, group 4, two splits, window, cap": ampere_decode(
            128, 1, 4, 16, 2, "bfloat16", BOTH, kind="int8"
        ),
        "decode, fp8, head dim 64, group 9, float16": ampere_decode(
            64, 1, 9, 64, 1, "float16", PLAIN, kind=E4M3
        ),
        "prefill, fp8, head dim 64, sinks": ampere_prefill(64, 1, 1, 16, 1, "bfloat16", SINKS, kind=E4M3),
        "latent decode, rank 128, 12 heads": latent(128, 64, 12, 64, 0, "bfloat16", longest=130),
        "latent prefill, rank 128, 3 heads, two splits": ampere_prefill(
            192, 1, 3, 16, 2, "bfloat16", PLAIN, rank=128
        ),
    },
    "copy_pages": {
        "16 bits": ampere_copy(None, "bfloat16", 128, 2, 16),
        "int8": ampere_copy("int8", "float16", 64, 1, 128),
        "fp8": ampere_copy(E4M3, "bfloat16", 256, 1, 32),
    },
    "kv_write": {
        "rotated, two groups of tokens": ampere_write(None, "bfloat16", 128, 2, 2, 16, 13, 64, ""),
        "normed, rotated in part, int8": ampere_write("int8", "bfloat16", 128, 1, 2, 16, 9, 32, "norm"),
        "normed, rotated, fp8": ampere_write(E4M3, "bfloat16", 64, 1, 1, 32, 3, 32, "gemma"),
    },
    "product": {
        "int4, offsets, 9 rows": mma(9, 64, 640, INT4, "bfloat16"),
        "MXFP4, inputs split": mma(3, 64, 1152, MXFP4, "float16"),
        "NVFP4, 20 rows": mma(20, 64, 192, NVFP4, "bfloat16"),
        "int4, groups of 64, offsets, 33 rows": mma(33, 64, 320, INT4_64, "float16"),
        "int8": mma(5, 64, 256, INT8, "bfloat16"),
        "fp8": mma(1, 64, 384, FP8, "float16"),
        "fp8 by group, 17 rows": mma(17, 64, 640, FP8_GROUPS, "bfloat16"),
        "experts, bfloat16": mma_groups((3, 0, 10), 64, 256, BFLOAT16, "bfloat16"),
        "experts, MXFP4": mma_groups((3, 0, 9), 64, 160, MXFP4, "bfloat16"),
        "every int8 number": mma_numbers("int8", "float16"),
        "every fp8 number": mma_numbers(E4M3, "bfloat16"),
    },
}
MORE_AMPERE: Cases = {
    "paged_attention": {
        "decode, head dim 128, two heads, group 1": ampere_decode(128, 2, 1, 32, 2, "bfloat16", WINDOW),
        "decode, head dim 256, group 16": ampere_decode(256, 1, 16, 64, 2, "float16", BOTH),
        "prefill, head dim 128": ampere_prefill(128, 1, 4, 64, None, "bfloat16", PLAIN),
        "prefill, head dim 256, sinks": ampere_prefill(256, 1, 2, 16, 2, "float16", SINKS),
        "decode, int8, head dim 256": ampere_decode(256, 1, 4, 32, 2, "float16", WINDOW, kind="int8"),
        "decode, fp8, head dim 128, two heads": ampere_decode(128, 2, 1, 128, 3, "bfloat16", CAP, kind=E4M3),
        "prefill, int8, head dim 128": ampere_prefill(128, 1, 4, 64, None, "float16", BOTH, kind="int8"),
        "prefill, fp8, head dim 256": ampere_prefill(256, 1, 2, 32, 1, "bfloat16", WINDOW, kind=E4M3),
        "latent decode, rank 512, 16 heads, pages of 16": latent(512, 64, 16, 16, 0, "float16", longest=150),
        "latent prefill, rank 512, 16 heads": ampere_prefill(576, 1, 16, 64, 1, "float16", PLAIN, rank=512),
    },
    "kv_write": {
        "plain, float16": ampere_write(None, "float16", 64, 1, 3, 64, 5, 0, ""),
        "normed, rotated by XLA": ampere_write(None, "bfloat16", 64, 3, 1, 32, 8, 24, "norm"),
        "one token, rotated": ampere_write(None, "bfloat16", 128, 2, 1, 16, 1, 64, "apart"),
        "head dim 256, fp8, 27 tokens": ampere_write(E4M3, "float16", 256, 2, 2, 64, 27, 128, "norm"),
        "int8, all queries in one array": ampere_write("int8", "bfloat16", 64, 5, 2, 16, 8, 0, ""),
    },
    "product": {
        "int4, offsets, 130 rows": mma(130, 128, 1152, INT4, "bfloat16"),
        "int4, groups of 32, float16": mma(8, 192, 416, replace(INT4, group=32), "float16"),
        "int4, 3 rows": mma(3, 64, 384, replace(INT4, offset=False), "bfloat16"),
        "fp8 by fp8": mma(4, 64, 512, FP8_BY_FP8, "bfloat16"),
        "fp8 by fp8, both by group": mma(4, 64, 512, FP8_BLOCKS, "bfloat16"),
        "int8, float16, 100 rows": mma(100, 64, 256, INT8, "float16"),
        "experts, int8, more rows": mma_groups((0, 70, 0, 1), 64, 128, INT8, "bfloat16"),
        "experts, int4, offsets": mma_groups((40, 1, 0), 64, 640, INT4, "float16"),
        "experts, NVFP4": mma_groups((100, 0, 2), 64, 96, NVFP4, "bfloat16"),
        "experts, fp8, float16": mma_groups((2, 0, 5), 64, 256, FP8, "float16"),
        "experts, fp8 by group": mma_groups((5, 0, 9), 64, 256, FP8_GROUPS, "float16"),
        "experts, int8 by int8": mma_groups((2, 0, 5), 64, 256, INT8_BY_INT8, "bfloat16"),
        "experts, fp8 by fp8": mma_groups((2, 0, 5), 64, 256, FP8_BY_FP8, "bfloat16"),
        "experts, fp8 by fp8, both by group": mma_groups((2, 0, 5), 64, 256, FP8_BLOCKS, "bfloat16"),
        "every int8 number, bfloat16": mma_numbers("int8", "bfloat16"),
        "every fp8 number, float16": mma_numbers(E4M3, "float16"),
    },
}
# For data-centre Blackwell, besides Ampere's.
BLACKWELL: Cases = {
    "paged_attention_prefill": {
        "head dim 128, group 4": tcgen05(128, 1, 4, 64, 64, "bfloat16", PLAIN),
        "head dim 64, group 3, pages of 16, sinks": tcgen05(64, 1, 3, 16, 64, "bfloat16", SINKS),
        "head dim 64, two heads, window, float16": tcgen05(64, 2, 1, 32, 64, "float16", LONG),
        "head dim 256, group 5, tiles of 16, window, cap": tcgen05(256, 1, 5, 64, 16, "bfloat16", BOTH),
        "head dim 128, group 4, tiles of 8, cap, int8": tcgen05(128, 1, 4, 64, 8, "bfloat16", CAP, "int8"),
        "head dim 64, group 4, pages of 32, window, fp8": tcgen05(64, 1, 4, 32, 64, "bfloat16", WINDOW, E4M3),
        "head dim 64, group 3, queries see later tokens": tcgen05(
            64, 1, 3, 16, 48, "bfloat16", BOTH, further=37
        ),
    },
    "grouped_product": {
        "int8, 20 rows": tensor_dense(20, 128, 1280, INT8, "bfloat16"),
        "fp8, float16, inputs split": tensor_split(E4M3, 20, 128, 2304, 3, dtype="float16"),
        "fp8 by group, 12 rows": tensor_dense(12, 128, 1280, FP8_GROUPS, "bfloat16"),
        "both fp8 by group, 40 rows": tensor_dense(40, 128, 1280, FP8_BLOCKS, "bfloat16"),
        "both fp8, 5 rows": tensor_sides(E4M3, 5, 128, 1024),
        "both int8, 20 rows, inputs split": tensor_sides("int8", 20, 128, 512, 2),
        "experts, bfloat16": tensor_groups((3, 0, 10), 128, 640, BFLOAT16, "bfloat16"),
        "experts, int8": tensor_groups((0, 20, 0, 1), 128, 256, INT8, "bfloat16"),
        "experts, fp8, float16": tensor_groups((2, 0, 25), 128, 256, FP8, "float16"),
        "experts, fp8 by group": tensor_groups((20, 0, 9), 128, 256, FP8_GROUPS, "bfloat16"),
        "experts, both fp8 by group": scaled_by_group(
            (20, 0, 9), inputs=True, out=128, kernel=products.grouped_product
        ),
        "every int8 number": tensor_numbers("int8", "bfloat16", outs=128),
        "every fp8 number": tensor_numbers(E4M3, "bfloat16", outs=128),
    },
}
MORE_BLACKWELL: Cases = {
    "paged_attention_prefill": {
        f"head dim {size}, group {group}, tiles of {tile}, pages of {page}, {kind or dtype}, {name}": tcgen05(
            size, 1, group, page, tile, dtype, ways, kind or None
        )
        for size, group, tile, page, dtype, kind, name, ways in (
            (64, 1, 128, 64, "float16", "", "window, cap", BOTH),
            (64, 9, 16, 192, "bfloat16", "int8", "sinks", SINKS),
            (128, 6, 48, 16, "bfloat16", "", "sinks", SINKS),
            (128, 3, 48, 16, "bfloat16", E4M3, "window, cap", BOTH),
            (128, 2, 128, 128, "float16", "int8", "window", WINDOW),
            (256, 2, 64, 16, "bfloat16", "", "long window", LONG),
            (256, 3, 48, 32, "float16", E4M3, "plain", PLAIN),
        )
    },
    "grouped_product": {
        "fp8, 200 rows": tensor_dense(200, 128, 512, FP8, "bfloat16"),
        "int8, 64 rows, two parts": tensor_dense(64, 256, 768, INT8, "bfloat16"),
        "both fp8 by group, 130 rows": tensor_dense(130, 128, 512, FP8_BLOCKS, "bfloat16"),
        "fp8 by group, 100 rows": tensor_dense(100, 128, 384, FP8_GROUPS, "float16"),
        "experts, float16": tensor_groups((70, 1, 0), 256, 128, WeightFormat("float16", 16), "float16"),
        "every int8 number, float16": tensor_numbers("int8", "float16", outs=128),
        "every fp8 number, float16": tensor_numbers(E4M3, "float16", outs=128),
    },
}


def parameters(*kernels: str, few: Cases = CASES, more: Cases = MORE) -> list[Any]:
    """For pytest: checks, schedules, and the least part of a kernel that must be executed. Long tests have
    more checks and schedules.
    """
    return [
        *_parameters(kernels, few, FEW, COVERED, ""),
        *_parameters(kernels, few, MANY, COVERED, ", all schedules", pytest.mark.full),
        *_parameters(kernels, more, FEW, 0.0, "", pytest.mark.full),
    ]


def _parameters(
    kernels: tuple[str, ...],
    cases: Cases,
    schedules: tuple[Schedule, ...],
    covered: float,
    more: str,
    *marks: Any,
) -> Iterator[Any]:
    for kernel in kernels:
        for name, check in cases.get(kernel, {}).items():
            yield pytest.param(check, schedules, covered, id=f"{kernel}, {name}{more}", marks=marks)
