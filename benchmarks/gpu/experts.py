"""Products of tokens with their experts' weights: checked first, then timed against the device's peak
rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.ceilings import Ceilings, ceilings
from benchmarks.gpu.correctness import compare
from benchmarks.gpu.inputs import KINDS as STORED
from benchmarks.gpu.rows import FAILED, Row, attempt, skipped
from benchmarks.gpu.timing import CHAIN, chained
from pallas_kernels.products import dispatch as product_dispatch
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.weights import stored
from pallas_kernels.quantization.int4 import quantize_int4
from pallas_kernels.quantization.quantized import quantize
from pallas_kernels.targets import Impl

KINDS = (*STORED, "int4")
GOAL = 0.7
CHECKED = 256  # rows whose results are checked


class Load(NamedTuple):
    """The experts of a layer, their number of inputs and outputs (`hidden`), tokens per step, and experts per
    token (`each`).
    """

    experts: int
    hidden: int
    tokens: tuple[int, ...]
    each: int


# FULL is a layer of Qwen3-30B-A3B
FULL, SMALL = Load(128, 2048, (1, 8, 64, 256, 2048, 8192), 8), Load(4, 64, (1, 5), 2)


def measure(small: bool) -> Iterator[Row]:
    """Yields a row per kind of weights and number of tokens. Few tokens are bound by memory, many by the
    tensor cores.
    """
    load, most = SMALL if small else FULL, ceilings(small)
    for kind in KINDS:
        weight = _weight(load, kind)
        x = jax.ShapeDtypeStruct((1, load.hidden), jnp.bfloat16)
        refused = None if small else product_dispatch.why_product_unsupported(x, weight, grouped=True)  # type: ignore[arg-type]
        for tokens in load.tokens:
            case = f"{kind or 'bfloat16'} weights, {tokens} tokens"
            yield (
                skipped(case, refused)
                if refused
                else attempt(case, partial(_row, case, load, weight, tokens, most, small))
            )


def _weight(load: Load, kind: str | None) -> Any:
    """Random weights [experts, out, in], scaled so that results are about as large as inputs."""

    def draw(key: jax.Array) -> Any:
        plain = jax.random.normal(key, (load.hidden, load.hidden), jnp.bfloat16) * load.hidden**-0.5
        if kind == "int4":
            return quantize_int4(plain, group=32)
        return quantize(plain, kind) if kind else plain

    return jax.jit(lambda: jax.lax.map(draw, jax.random.split(jax.random.key(0), load.experts)))()


def _row(case: str, load: Load, weight: Any, tokens: int, most: Ceilings, small: bool) -> Row:
    rng = np.random.default_rng(tokens)
    chosen = np.stack(
        [[rng.permutation(load.experts)[: load.each] for _ in range(tokens)] for _ in range(CHAIN)]
    ).reshape(CHAIN, -1)
    x = jax.random.normal(jax.random.key(1), (tokens * load.each, load.hidden)).astype(jnp.bfloat16)
    impl: Impl = "xla" if small else "mosaic"

    def run(x: jax.Array, chosen: jax.Array, weight: Any) -> jax.Array:
        groups = grouped(chosen, load.experts)
        return stored(weight).grouped_product(x[groups.row], groups, impl=impl)[groups.place]

    error = _error(jax.jit(run)(x, jnp.asarray(chosen[0]), weight), x, chosen[0], weight)
    seconds = chained(run, x, jnp.asarray(chosen), weight)
    met = float(np.mean([len(np.unique(one)) for one in chosen]))
    moved = met / load.experts * sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(weight))
    operations = 2 * x.size * load.hidden
    shares = {"memory": moved / seconds / most.bandwidth, "products": operations / seconds / most.rate}
    values = {
        "us": 1e6 * seconds,
        "GB/s": moved / seconds / 1e9,
        "TFLOP/s": operations / seconds / 1e12,
        "error / allowed": error,
    }
    goal = GOAL if not small and moved > 1 << 27 else None
    right = "" if goal else "ok"
    return Row(case, values | {"share": max(shares.values())}, goal, outcome=right if error <= 1 else FAILED)


def _error(got: jax.Array, x: jax.Array, chosen: np.ndarray, weight: Any) -> float:
    """The largest error in some rows, relative to the error that rounding the result allows."""
    some = np.unique(np.linspace(0, len(chosen) - 1, CHECKED, dtype=int))

    def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, expert = args
        matrix = weight[expert]
        wide = stored(matrix).dequantized()
        return jnp.einsum("oi,i->o", wide.astype(jnp.float32), row.astype(jnp.float32), precision="highest")

    want = np.asarray(jax.jit(lambda *args: jax.lax.map(one, args))(x[some], jnp.asarray(chosen[some])))
    scaled = 2 * float(jnp.finfo(jnp.bfloat16).eps)  # rounding of the result and of dequantized weights
    return compare(got[some], want, scaled * (np.abs(want) + np.abs(want).max(-1, keepdims=True))).worst
