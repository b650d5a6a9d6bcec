"""The time of each sampler beyond the product with the vocabulary, for requests that use none of its
features.

    python -m benchmarks.samplers [--rows 8 32] [--vocab 32000 128256] [--quick]

Programs run in turns. Times are the minimum over all rounds, which other load affects least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import save
from jengine.core.request import SamplingParams
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.sampler import sample, with_wanted_logprobs
from jengine.execution.sampling_row import pack_sampling, sampling_of
from jengine.scheduling.step_plan import SlotReset
from jengine.table.program_table import Variant
from pallas_kernels.weights import product

HIDDEN = 768
ARMS: dict[str, Variant | None] = {"product": None, **{variant: variant for variant in get_args(Variant)}}


def program(variant: Variant | None) -> Callable[..., Any]:
    """(hidden, weight, sampling words, positions, counts, mask) -> logits, or tokens, with log probabilities
    if the variant has them.
    """

    def run(
        hidden: jax.Array,
        weight: jax.Array,
        words: jax.Array,
        positions: jax.Array,
        counts: jax.Array,
        mask: jax.Array,
    ) -> Any:
        logits = product(hidden, weight, jnp.float32)
        if variant is None:
            return logits
        sampling = sampling_of(words)
        if variant != "full":
            return sample(logits, sampling, positions, variant)
        tokens = sample(logits, sampling, positions, variant, lambda: counts, mask)
        return with_wanted_logprobs(logits, tokens, sampling)

    return jax.jit(run)


def measure(rows: int, vocab: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the product alone, and of each variant in addition to it."""
    rng = np.random.default_rng(0)
    words = [
        pack_sampling(SlotReset(1, SamplingParams(temperature=1.0), row, 0, 5, ()))[1:] for row in range(rows)
    ]
    args = (
        *(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((rows, HIDDEN), (vocab, HIDDEN))),
        jnp.asarray(np.stack(words)),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.zeros((rows, vocab), jnp.int32),
        jnp.full((rows, mask_words(vocab)), ALL_ALLOWED),
    )
    programs = {name: program(variant).lower(*args).compile() for name, variant in ARMS.items()}
    best = dict.fromkeys(programs, float("inf"))
    for round_number in range(1 + rounds):
        for name, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*args))
            if round_number:  # the first calls of a process are slower
                best[name] = min(best[name], time.perf_counter() - begin)
    alone = best["product"]
    return {
        name: round(1e3 * (seconds if name == "product" else seconds - alone), 3)
        for name, seconds in best.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one size, a few rounds, nothing saved")
    options = parser.parse_args()
    sizes = (
        [(8, 32000)] if options.quick else [(rows, vocab) for vocab in options.vocab for rows in options.rows]
    )
    results = {
        f"{rows} x {vocab}": measure(rows, vocab, 3 if options.quick else options.rounds)
        for rows, vocab in sizes
    }
    print(f"{'ms':14}" + "".join(f"{name:>11}" for name in ARMS))
    for size, times in results.items():
        print(f"{size:14}" + "".join(f"{times[name]:11.3f}" for name in ARMS))
    if not options.quick:
        save("samplers", {"hidden": HIDDEN, "ms": results})


if __name__ == "__main__":
    main()
