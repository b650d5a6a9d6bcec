"""A GRPO loop whose trainer stores weights as Levanter does, and updates from each trainer's layout.

    python -m benchmarks.rollouts [--steps 10]

The trainer is that of trainer.py. A reward is the share of vowels in a completion. `tunix_grpo` measures a
loop with Tunix.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from benchmarks.machine import save
from benchmarks.trainer import Config, batch, objective
from benchmarks.tunix_grpo import PROMPTS, reward
from jengine import LLM, SamplingParams, trainer_weights
from jengine.base.compiles import compile_count
from jengine.base.model_files import read_object
from tests.checkpoints.trainer_trees import TREES

TOKENS = 32  # of a completion
LENGTH = 64  # of a prompt with its completion


def train(llm: LLM, tree: Any, config: Config, steps: int, generations: int = 8) -> dict[str, Any]:
    optimizer = optax.adam(1e-3)
    state = optimizer.init(tree)
    gradients = jax.jit(jax.value_and_grad(partial(objective, config=config), has_aux=True))

    @jax.jit
    def changed(tree: Any, state: Any, by: Any) -> Any:
        updates, state = optimizer.update(by, state, tree)
        return optax.apply_updates(tree, updates), state

    rows = []
    for step in range(steps + 1):  # the first compiles the trainer, and what reads its layout
        if step == 1:
            compiled = compile_count()
        begun = time.perf_counter()
        params = [
            SamplingParams(max_tokens=TOKENS, seed=step * generations + at, logprobs=0)
            for _ in PROMPTS
            for at in range(generations)
        ]
        prompts = [prompt for prompt in PROMPTS for _ in range(generations)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        generated = time.perf_counter()
        rewards = np.array([reward(output.outputs[0].text) for output in outputs]).reshape(-1, generations)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
        tokens, sampled, mask = batch(outputs, LENGTH)
        (_, mine), by = gradients(tree, tokens, sampled, mask, advantages.reshape(-1, 1))
        tree, state = jax.block_until_ready(changed(tree, state, by))
        trained = time.perf_counter()
        llm.update_weights(trainer_weights(tree, "levanter"))
        ended = time.perf_counter()
        difference = np.abs(np.asarray(mine) - sampled)[mask]
        rows.append((
            int(mask.sum()) / (generated - begun), (generated - begun) / (ended - begun),
            1e3 * (ended - trained), difference.max(), difference.mean(), rewards.mean(),
        ))  # fmt: skip
        print(step, [round(float(number), 6) for number in rows[-1]], flush=True)
    speed, share, sync, largest, mean, rewarded = zip(*rows[1:], strict=True)
    return {
        "tokens_per_second": round(statistics.median(speed), 1),
        "share_of_time_in_generation": round(statistics.median(share), 3),
        "sync_ms": round(statistics.median(sync), 2),
        "sync_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(tree)),
        "logprob_difference": {"largest": float(max(largest)), "mean": float(np.mean(mean))},
        "compilations_after_first_step": compile_count() - compiled,
        "mean_reward_by_step": [round(float(each), 4) for each in rewarded],
    }


def updates(llm: LLM, tensors: Mapping[str, np.ndarray], config: Config, repeat: int) -> dict[str, Any]:
    """Milliseconds of updates after the first from each layout, with arrays on the engine's device."""
    trees: dict[str, Any] = {"hugging_face": {name: jnp.asarray(array) for name, array in tensors.items()}}
    layouts = ("levanter", "maxtext_llama" if config["model_type"] == "llama" else "maxtext", "keras_hub")
    for layout in layouts:
        tree = TREES[layout](tensors, config)
        trees[layout] = tree if layout == "keras_hub" else jax.tree.map(jnp.asarray, tree)
    results = {}
    for name, tree in trees.items():
        seconds, compiled = [], 0
        for round_ in range(repeat + 1):
            compiled = compile_count() if round_ == 1 else compiled
            begun = time.perf_counter()
            llm.update_weights(tree if name == "hugging_face" else trainer_weights(tree, name))
            seconds.append(time.perf_counter() - begun)
        results[name] = {
            "ms": round(1e3 * statistics.median(seconds[1:]), 2),
            "bytes": sum(array.nbytes for array in tensors.values()),
            "compilations_after_first": compile_count() - compiled,
        }
        print(name, results[name], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=10, help="updates from each layout")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 64,
        "max_model_len": LENGTH,
        "warm_up": "all",
    }
    llm = LLM("demo", weight_updates=True, progress=False, **options)
    folder = Path(llm.started.folder)
    config = read_object(folder / "config.json")
    tensors = {
        name: array.astype(np.float32) for name, array in load_file(folder / "model.safetensors").items()
    }
    layouts = updates(llm, tensors, config, args.repeat)
    tree = jax.tree.map(jnp.asarray, TREES["levanter"](tensors, config))
    loop = train(llm, tree, config, args.steps)
    llm.close()
    print(loop)
    save("rollouts", {"model": "demo", "loop": loop, "updates": layouts})


if __name__ == "__main__":
    main()
