"""A GRPO loop whose trainer stores weights as Levanter does, and updates from each trainer's layout.

    python -m benchmarks.rollouts [--steps 10]

The trainer is a decoder in plain JAX that scans Levanter's stacked layers, so it shares no code with the
engine. A reward is the share of vowels in a completion. `tunix_grpo` measures a loop with Tunix.
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
from benchmarks.tunix_grpo import PROMPTS, reward
from jengine import LLM, RequestOutput, SamplingParams, trainer_weights
from jengine.base.compiles import compile_count
from jengine.base.model_files import read_object
from tests.checkpoints.trainer_trees import TREES

TOKENS = 32  # of a completion
LENGTH = 64  # of a prompt with its completion
Config = Mapping[str, Any]


def norm(x: jax.Array, weight: jax.Array, config: Config) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * weight


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """[rows, length, ..., head_dim]"""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    angles = angles.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logprobs(tree: Any, tokens: jax.Array, *, config: Config) -> jax.Array:
    """Log probabilities of tokens [rows, length], each after those before it: float32 [rows, length - 1]."""
    theta, leaf = config["rope_theta"], lambda node: node["weight"].array
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        attention, mlp = weights["self_attn"], weights["mlp"]
        h = norm(x, leaf(weights["input_layernorm"]), config)
        q = jnp.einsum("rte,kgde->rtkgd", h, leaf(attention["q_proj"]))
        k = jnp.einsum("rte,kde->rtkd", h, leaf(attention["k_proj"]))
        v = jnp.einsum("rte,kde->rtkd", h, leaf(attention["v_proj"]))
        scores = jnp.einsum("rtkgd,rskd->rkgts", rotated(q, theta), rotated(k, theta)) / q.shape[-1] ** 0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        heads = jnp.einsum("rkgts,rskd->rtkgd", shares, v)
        x = x + jnp.einsum(
            "rthd,ehd->rte", heads.reshape(*x.shape[:2], -1, v.shape[-1]), leaf(attention["o_proj"])
        )
        h = norm(x, leaf(weights["post_attention_layernorm"]), config)
        h = jax.nn.silu(h @ leaf(mlp["gate_proj"]).T) * (h @ leaf(mlp["up_proj"]).T)
        return x + h @ leaf(mlp["down_proj"]).T, None

    embeddings = leaf(tree["embeddings"]["token_embeddings"])
    head = embeddings if tree["lm_head"] is None else leaf(tree["lm_head"])
    x, _ = jax.lax.scan(layer, embeddings[tokens], tree["transformer"]["layers"]["stacked"])
    logits = norm(x, leaf(tree["transformer"]["norm"]), config) @ head.T
    return jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def objective(tree: Any, tokens: Any, sampled: Any, mask: Any, advantages: Any, *, config: Config) -> Any:
    """GRPO's loss with clipped ratios, and the trainer's log probabilities."""
    mine = logprobs(tree, tokens, config=config)
    ratio = jnp.exp(jnp.where(mask, mine - sampled, 0))
    gains = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -(gains * mask).sum() / mask.sum(), mine


def batch(outputs: list[RequestOutput]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [rows, LENGTH]; the engine's log probabilities, and where they are: [rows, LENGTH - 1]."""
    tokens = np.zeros((len(outputs), LENGTH), np.int32)
    sampled, mask = (
        np.zeros((len(outputs), LENGTH - 1), np.float32),
        np.zeros((len(outputs), LENGTH - 1), bool),
    )
    for row, output in enumerate(outputs):
        completion = output.outputs[0]
        prompt = [*(output.prompt_token_ids or [])]
        whole = [*prompt, *completion.token_ids]
        tokens[row, : len(whole)] = whole
        part = slice(len(prompt) - 1, len(whole) - 1)
        entries = zip(completion.token_ids, completion.logprobs or [], strict=True)
        sampled[row, part], mask[row, part] = [entry[token].logprob for token, entry in entries], True
    return tokens, sampled, mask


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
        tokens, sampled, mask = batch(outputs)
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
