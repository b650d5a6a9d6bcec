"""Trains a small model with Tunix's GRPO: with jengine as the rollout engine, and with Tunix's own sampler.

    python -m benchmarks.tunix_grpo [--steps 20]

Needs the extra `tunix`. Both start from the same weights; their random numbers differ.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.machine import save

PROMPTS = [
    "def f(x):",
    "class A:",
    "import os",
    "for i in range(9):",
    "x = [1, 2]",
    "return",
    "try:",
    "# the",
]
WANTED = "aeiou"  # a reward is the share of these characters in a completion


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [sum(text.count(one) for one in WANTED) / max(len(text), 1) for text in completions]


class Timed:
    """Counts tokens and seconds of a rollout engine's `generate`, and remembers the rewards."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def watch(self, rollout: Any) -> None:
        generate = rollout.generate

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            out = generate(*args, **options)
            self.seconds.append(time.perf_counter() - start)
            self.tokens.append(sum(len(tokens) for tokens in out.tokens))
            self.rewards.append(float(np.mean(reward([], out.text))))
            return out

        rollout.generate = timed


def train(
    engine: Any,
    actor: nnx.Module,
    tokenizer: Any,
    mesh: jax.sharding.Mesh,
    *,
    steps: int,
    tokens: int = 32,
    prompts: int = 4,
    generations: int = 8,
    rate: float = 3e-3,
) -> Timed:
    """Trains the actor with GRPO.

    Args:
        engine: as ClusterConfig.rollout_engine.
        tokens: the length of completions.
        prompts, generations: prompts of a step, and completions of a prompt.
    """
    from tunix.rl import rl_cluster as cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    timed = Timed()
    trainer = cluster.RLCluster(
        actor=actor,
        tokenizer=tokenizer,
        cluster_config=cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(cluster.Role, mesh),
            rollout_engine=engine,
            training_config=cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(rate),
                eval_every_n_steps=steps + 1,
                max_steps=steps,
                mini_batch_size=prompts,
                train_micro_batch_size=prompts,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=tokens,
                max_prompt_length=16,
                kv_cache_size=16 + tokens,
                temperature=1.0,
                return_logprobs=True,
            ),
        ),
    )
    timed.watch(trainer.rollout)
    learner = GRPOLearner(
        rl_cluster=trainer,
        algo_config=GRPOConfig(num_generations=generations, beta=0.0),
        reward_fns=reward,
    )
    learner.train(batches(steps, prompts))
    trainer.close()
    if hasattr(trainer.rollout, "close"):
        trainer.rollout.close()
    return timed


def batches(steps: int, prompts: int) -> Iterator[dict[str, Any]]:
    for step in range(steps):
        yield {"prompts": np.array([PROMPTS[(step * prompts + at) % len(PROMPTS)] for at in range(prompts)])}


def main() -> None:
    from jengine.tunix.rollout import JengineRollout
    from tests.on_tunix.models import actor_of, mesh, tokenizer_of, write_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    folder = write_folder(
        Path(tempfile.mkdtemp()), hidden_size=256, intermediate_size=640, num_hidden_layers=4
    )
    results: dict[str, Any] = {}
    for name, engine in (
        ("jengine", partial(JengineRollout, model=folder, dtype="float32", max_num_seqs=64)),
        ("tunix", "vanilla"),
    ):
        timed = train(
            engine, actor_of(folder), tokenizer_of(folder), mesh(), steps=args.steps, prompts=8, rate=1e-3
        )
        results[name] = {
            "rewards": [round(one, 4) for one in timed.rewards],
            # the first call compiles Tunix's sampler
            "tokens_per_second": round(sum(timed.tokens[1:]) / sum(timed.seconds[1:]), 1),
            "first_call_seconds": round(timed.seconds[0], 2),
        }
        print(name, results[name], flush=True)
    save("tunix_grpo", {"steps": args.steps, **results})


if __name__ == "__main__":
    main()
