"""Trains a small model with Tunix's GRPO: with jengine as the rollout engine, and with Tunix's own sampler.

    python -m benchmarks.tunix_grpo [--steps 20]

Needs the extra `tunix`. Both start from the same weights; their random numbers differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
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

from benchmarks.machine import RESULTS, save

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
LONGEST = 96  # tokens of a completion
WANTED = "aeiou"  # a reward is the share of these characters in a completion


def reward(completion: str) -> float:
    return sum(completion.count(one) for one in WANTED) / max(len(completion), 1)


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
) -> list[float]:
    """Trains the actor with GRPO. Returns the mean reward of each step.

    Args:
        engine: as ClusterConfig.rollout_engine.
        tokens: the length of completions.
        prompts, generations: prompts of a step, and completions of a prompt.
    """
    from tunix.rl import rl_cluster as cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    rewards: list[float] = []

    def remembered(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        each = [reward(text) for text in completions]
        rewards.append(float(np.mean(each)))
        return each

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
            rollout_config=rollout_config(tokens),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=trainer,
        algo_config=GRPOConfig(num_generations=generations, beta=0.0),
        reward_fns=remembered,
    )
    learner.train(batches(steps, prompts))
    trainer.close()
    if hasattr(trainer.rollout, "close"):
        trainer.rollout.close()
    return rewards


def rollout_config(tokens: int, **more: Any) -> Any:
    from tunix.rl.rollout.base_rollout import RolloutConfig

    return RolloutConfig(
        max_tokens_to_generate=tokens,
        max_prompt_length=16,
        kv_cache_size=16 + LONGEST,
        temperature=1.0,
        return_logprobs=True,
        **more,
    )


def speeds(rollouts: dict[str, Any], rounds: int, tokens: int, ends: list[int] | None) -> dict[str, Any]:
    """Tokens a second of each rollout engine, and tokens in a second of processor time, which depends less on
    what else the machine does: medians of calls in turn, after one of each that compiles.

    Args:
        ends: tokens at which completions end, by chance.
    """
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in rollouts}
    for _ in range(rounds + 1):
        for name, rollout in rollouts.items():
            start, busy = time.perf_counter(), time.process_time()
            out = rollout.generate(prompts, rollout_config(tokens, eos_tokens=ends))
            took = time.perf_counter() - start, time.process_time() - busy
            found[name].append((sum(map(len, out.tokens)), *took))
    return {
        name: {
            "tokens": statistics.median(tokens for tokens, _, _ in each[1:]),
            "per_second": round(statistics.median(tokens / wall for tokens, wall, _ in each[1:]), 1),
            "per_processor_second": round(
                statistics.median(tokens / busy for tokens, _, busy in each[1:]), 1
            ),
        }
        for name, each in found.items()
    }


def batches(steps: int, prompts: int) -> Iterator[dict[str, Any]]:
    for step in range(steps):
        yield {"prompts": np.array([PROMPTS[(step * prompts + at) % len(PROMPTS)] for at in range(prompts)])}


def main() -> None:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from jengine.integrations.tunix.rollout import JengineRollout
    from tests.integrations.tunix.models import actor_of, mesh, tokenizer_of, write_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=20, help="of training; 0: keep the rewards that are saved"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    folder = write_folder(
        Path(tempfile.mkdtemp()), hidden_size=256, intermediate_size=640, num_hidden_layers=4
    )
    engine = partial(JengineRollout, model=folder, dtype="float32", max_num_seqs=64)
    saved = RESULTS / "tunix_grpo.json"
    rewards = {} if args.steps else json.loads(saved.read_text())["mean_reward_by_step"]
    for name, each in (("jengine", engine), ("tunix", "vanilla")) if args.steps else ():
        start = time.perf_counter()
        rewards[name] = train(
            each, actor_of(folder), tokenizer_of(folder), mesh(), steps=args.steps, rate=1e-3
        )
        print(
            name, [round(one, 3) for one in rewards[name]], f"{time.perf_counter() - start:.0f} s", flush=True
        )
    actor, tokenizer = actor_of(folder), TokenizerAdapter(tokenizer_of(folder))
    ours = engine(
        rollout_actor=actor, tokenizer=tokenizer, mesh=mesh(), rollout_config=rollout_config(LONGEST)
    )
    config: Any = actor.config  # type: ignore[attr-defined]
    cache = CacheConfig(16 + LONGEST, config.num_layers, config.num_kv_heads, config.head_dim)
    rollouts = {"jengine": ours, "tunix": VanillaRollout(actor, tokenizer, cache)}
    found = {
        "32 tokens each": speeds(rollouts, args.rounds, 32, None),
        f"up to {LONGEST} tokens": speeds(rollouts, args.rounds, LONGEST, list(range(2, 27))),
    }
    ours.close()
    for name, each in found.items():
        print(name, each)
    save("tunix_grpo", {"mean_reward_by_step": rewards, "rollouts": found})


if __name__ == "__main__":
    main()
