"""Products of Ampere's and of Blackwell's kernels, to be compiled for GPUs that are not there."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_facts import E4M3, Case

from pallas_kernels.devices import traced_for
from pallas_kernels.products import weights
from pallas_kernels.products.groups import grouped
from pallas_kernels.quantization.formats import WeightFormat


def product(
    rows: int,
    form: WeightFormat,
    *,
    by: str,
    experts: int = 0,
    dtype: Any = jnp.bfloat16,
) -> Case:
    """Rows by a weight of 4096 outputs and 14336 inputs, or by experts of that size.

    Args:
        by: generation of the kernel.
    """
    groups = (experts,) if experts else ()
    weight = weights.abstract(jax.ShapeDtypeStruct((*groups, 4096, 14336), dtype), form)
    x = jax.ShapeDtypeStruct((rows, 14336), dtype)

    if not experts:
        return partial(_dense, by=by), (x, weight)
    return partial(_of_experts, by=by), (x, weight, jax.ShapeDtypeStruct((rows,), jnp.int32))


def _dense(x: jax.Array, weight: Any, *, by: str) -> jax.Array:
    stored = weights.stored(weight)
    [run, *_] = (kernel.run for kernel in stored.table(grouped=False) if kernel.target.name == by)
    y: jax.Array = run(x, stored, x.dtype, traced_for())
    return y


def _of_experts(x: jax.Array, weight: Any, chosen: jax.Array, *, by: str) -> jax.Array:
    stored, groups = weights.stored(weight), grouped(chosen, weight.shape[0])
    [run, *_] = (kernel.run for kernel in stored.table(grouped=True) if kernel.target.name == by)
    y: jax.Array = run(x[groups.row], stored, groups)
    return y


ampere_product = partial(product, by="Ampere")
AMPERE_FORMATS = {
    **{f"int4, groups of {group}": WeightFormat("int4", 4, group, offset=True) for group in (32, 64, 128)},
    "MXFP4": WeightFormat("e2m1", 4, 32),
    "NVFP4": WeightFormat("e2m1", 4, 16),
    "int8": WeightFormat("int8", 8),
    "fp8": WeightFormat(E4M3, 8),
    "fp8 in groups of 128": WeightFormat(E4M3, 8, 128),
}
AMPERE_PRODUCTS: dict[str, Case] = {
    f"{name}, {rows} rows": ampere_product(rows, form)
    for name, form in AMPERE_FORMATS.items()
    for rows in (8, 64)
} | {
    "experts, bfloat16": ampere_product(512, WeightFormat("bfloat16", 16), experts=8),
    "experts, MXFP4": ampere_product(512, AMPERE_FORMATS["MXFP4"], experts=8),
    "int4, groups of 128, float16, 64 rows": ampere_product(
        64, AMPERE_FORMATS["int4, groups of 128"], dtype=jnp.float16
    ),
    "fp8, float16, 8 rows": ampere_product(8, AMPERE_FORMATS["fp8"], dtype=jnp.float16),
}
FP8_BLOCKS = WeightFormat(E4M3, 8, 128, inputs=E4M3)
BLACKWELL_FORMATS = {
    "int8": WeightFormat("int8", 8),
    "fp8": WeightFormat(E4M3, 8),
    "fp8 in groups of 128": WeightFormat(E4M3, 8, 128),
    "both fp8 in groups of 128": FP8_BLOCKS,
}
blackwell_product = partial(product, by="Blackwell")
BLACKWELL_PRODUCTS: dict[str, Case] = {
    f"{name}, {rows} rows": blackwell_product(rows, form)
    for name, form in BLACKWELL_FORMATS.items()
    for rows in (16, 64, 256)
} | {
    "experts, bfloat16": blackwell_product(512, WeightFormat("bfloat16", 16), experts=8),
    "experts, int8": blackwell_product(512, WeightFormat("int8", 8), experts=8),
    "experts, both fp8 in groups of 128": blackwell_product(512, FP8_BLOCKS, experts=8),
    "fp8, float16, 64 rows": blackwell_product(64, WeightFormat(E4M3, 8), dtype=jnp.float16),
}
