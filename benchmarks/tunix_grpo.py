"""Trains a small model with Tunix's GRPO: with jengine as the rollout engine, and with Tunix's own sampler.

    python -m benchmarks.tunix_grpo [--steps 20]

Needs the extra `tunix`. Both start from the same weights; their random numbers differ. `rollouts` measures a
loop without Tunix.
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
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """A call of a rollout engine: start and end in seconds, tokens that it generated, and compilations of the
    engine until its end.
    """

    name: str
    begun: float
    ended: float
    tokens: int
    compilations: int


def measured(calls: list[Call]) -> Any:
    """The class of a JengineRollout that records its calls."""
    from jengine.integrations.tunix.rollout import JengineRollout

    class MeasuredRollout(JengineRollout):
        def generate(self, *args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            out = super().generate(*args, **options)
            self.record("generate", begun, sum(map(len, out.tokens)))
            return out

        def update_params(self, *args: Any, **options: Any) -> None:
            begun = time.perf_counter()
            super().update_params(*args, **options)
            self.record("update", begun, 0)

        def record(self, name: str, begun: float, tokens: int) -> None:
            compiled = self.llm.stats["compiles_since_start"]
            calls.append(Call(name, begun, time.perf_counter(), tokens, compiled))

    return MeasuredRollout


def loop_figures(calls: list[Call]) -> dict[str, Any]:
    """Figures of the steps after the first, in which Tunix compiles."""
    first, *updates = [call for call in calls if call.name == "update"]
    begun, ended = first.ended, updates[-1].ended
    generated = [call for call in calls if call.name == "generate" and begun < call.begun < ended]
    seconds = sum(call.ended - call.begun for call in generated)
    return {
        "tokens_per_second": round(sum(call.tokens for call in generated) / seconds, 1),
        "share_of_time_in_generation": round(seconds / (ended - begun), 3),
        "sync_ms": round(1e3 * statistics.median(call.ended - call.begun for call in updates), 2),
        "compilations_after_first_step": updates[-1].compilations - first.compilations,
    }


def logprob_difference(rollout: Any, actor: nnx.Module) -> dict[str, float]:
    """Between log probabilities that the engine sampled with and Tunix's."""
    from tests.integrations.tunix.models import per_token

    out = rollout.generate(PROMPTS, rollout_config(32))
    width, pad = max(map(len, out.tokens)), rollout.pad_id()
    completions = np.stack([np.pad(row, (0, width - len(row)), constant_values=pad) for row in out.tokens])
    trained = per_token(actor, out.left_padded_prompt_tokens, completions, pad, rollout.eos_id(), 1.0)
    differences = np.concatenate(
        [np.abs(row[: len(mine)] - mine) for row, mine in zip(np.asarray(trained), out.logprobs, strict=True)]
    )
    return {"largest": float(differences.max()), "mean": float(differences.mean())}


def batches(steps: int, prompts: int) -> Iterator[dict[str, Any]]:
    for step in range(steps):
        yield {"prompts": np.array([PROMPTS[(step * prompts + at) % len(PROMPTS)] for at in range(prompts)])}


def main() -> None:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

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
    calls = list[Call]()
    engine = partial(measured(calls), model=folder, dtype="float32", max_num_seqs=64)
    saved = RESULTS / "tunix_grpo.json"
    earlier = {} if args.steps else json.loads(saved.read_text())
    rewards = earlier.get("mean_reward_by_step", {})
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
    loop = loop_figures(calls) if args.steps else earlier["loop"]
    loop["sync_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(actor, nnx.Param)))
    loop["logprob_difference"] = logprob_difference(ours, actor)
    ours.close()
    print(loop)
    for name, each in found.items():
        print(name, each)
    save("tunix_grpo", {"mean_reward_by_step": rewards, "loop": loop, "rollouts": found})


if __name__ == "__main__":
    main()
