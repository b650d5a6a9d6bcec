"""A GRPO loop on one device: a trainer in plain JAX and an engine, with Levanter's layout of weights.

The model is a Llama with 1B parameters and random weights. A reward is the share of even token ids in a
completion. The engine sleeps while the trainer works, and gets the new weights when it wakes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.features import DEMO
from benchmarks.gpu.programs import missing_modules
from benchmarks.gpu.rows import Row, failed, skipped


class Size(NamedTuple):
    """A model and a loop. Memory: the engine's share of the device."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    dtype: str
    prompts: int
    tokens: int
    steps: int
    memory: float


GENERATIONS, PROMPT = 8, 32
FULL = Size(16, 2048, 32, 8, 64, 8192, 128256, "bfloat16", prompts=8, tokens=96, steps=6, memory=0.3)
SMALL = Size(2, 64, 4, 2, 16, 128, 512, "float32", prompts=2, tokens=8, steps=2, memory=0.9)
# of log probabilities: rounding, after products in bfloat16 in another order
MEAN_DIFFERENCE = {"bfloat16": 0.05, "float32": 1e-4}


def measure(small: bool) -> Iterator[Row]:
    if (missing := missing_modules()) is not None:
        yield skipped("jengine", missing)
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(DEMO / "tokenizer.json", folder)  # an LLM needs one; this loop does not use it
        yield _loop(SMALL if small else FULL, Path(folder))


def config_of(size: Size) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "head_dim": size.head_dim,
        "num_key_value_heads": size.kv_heads, "vocab_size": size.vocab, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 4096, "dtype": size.dtype,
    }  # fmt: skip


def random_tree(size: Size) -> Any:
    """Weights in the layout of Levanter's LlamaLMHeadModel, on the device."""
    from tests.checkpoints.trainer_trees import NamedArray

    hidden, kv = size.hidden, size.kv_heads
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def matrix(*shape: int, inputs: int = hidden) -> dict[str, Any]:
        drawn = jax.random.normal(next(keys), shape, size.dtype) * inputs**-0.5
        return {"weight": NamedArray(drawn)}

    def ones(*shape: int) -> dict[str, Any]:
        return {"weight": NamedArray(jnp.ones(shape, size.dtype))}

    layers, kv_shape = size.layers, (size.layers, kv, size.head_dim, hidden)
    attention = {
        "q_proj": matrix(layers, kv, size.heads // kv, size.head_dim, hidden),
        "k_proj": matrix(*kv_shape),
        "v_proj": matrix(*kv_shape),
        "o_proj": matrix(layers, hidden, size.heads, size.head_dim, inputs=size.heads * size.head_dim),
    }
    mlp = {
        "gate_proj": matrix(layers, size.ffn, hidden),
        "up_proj": matrix(layers, size.ffn, hidden),
        "down_proj": matrix(layers, hidden, size.ffn, inputs=size.ffn),
    }
    norms = {name: ones(layers, hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    return {
        "transformer": {
            "layers": {"stacked": {"self_attn": attention, "mlp": mlp, **norms}},
            "norm": ones(hidden),
        },
        "embeddings": {"token_embeddings": matrix(size.vocab, hidden)},
        "lm_head": None,
    }


def _loop(size: Size, folder: Path) -> Row:
    from benchmarks.trainer import batch, objective
    from jengine import LLM, SamplingParams, trainer_weights
    from jengine.base.compiles import compile_count

    config, tree, length = config_of(size), random_tree(size), PROMPT + size.tokens
    rows = size.prompts * GENERATIONS
    gradients = jax.jit(jax.value_and_grad(partial(objective, config=config), has_aux=True))

    @partial(jax.jit, donate_argnums=0)
    def changed(tree: Any, by: Any) -> Any:
        return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, tree, by)

    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": ids}
        for ids in rng.integers(0, size.vocab, (size.prompts, PROMPT)).tolist()
        for _ in range(GENERATIONS)
    ]
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(folder), params=trainer_weights(tree, "levanter"), weight_updates=True, dtype=size.dtype,
        max_num_seqs=rows, max_model_len=length, gpu_memory_utilization=size.memory, warm_up="all",
        progress=False,
    )  # fmt: skip
    laps: dict[str, list[float]] = {name: [] for name in ("generate", "sleep", "train", "update", "wake")}
    differences, memory, compiled = list[np.ndarray](), list[tuple[float, float]](), 0
    for step in range(size.steps + 1):  # the first compiles the trainer, and what reads its layout
        if step == 1:
            compiled = compile_count()
        clock = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            laps[name].append(now - clock)
            clock = now

        params = [
            SamplingParams(
                max_tokens=size.tokens, ignore_eos=True, detokenize=False, seed=step * rows + at, logprobs=0
            )
            for at in range(rows)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        lap("generate")
        awake = _in_use()
        llm.sleep(level=2)
        lap("sleep")
        memory.append((awake, _in_use()))
        tokens, sampled, mask = batch(outputs, length)
        even = (tokens[:, PROMPT:] % 2 == 0).mean(1).reshape(-1, GENERATIONS)
        advantages = (even - even.mean(1, keepdims=True)) / (even.std(1, keepdims=True) + 1e-4)
        (_, mine), by = gradients(tree, tokens, sampled, mask, advantages.reshape(-1, 1))
        tree = jax.block_until_ready(changed(tree, by))
        differences.append(np.abs(np.asarray(mine, np.float32) - sampled)[mask])
        del by
        lap("train")
        llm.wake_up(["weights"])
        lap("wake")
        llm.update_weights(trainer_weights(tree, "levanter"))
        lap("update")
        llm.wake_up(["kv_cache"])
        lap("wake")
    llm.close()
    counts = {name: len(seconds) // len(differences) for name, seconds in laps.items()}  # in a step
    medians = {name: statistics.median(laps[name][count:]) for name, count in counts.items()}
    whole = sum(medians.values()) + medians["wake"]
    mean = float(np.mean([each.mean() for each in differences]))
    values = {
        "tokens/s": rows * size.tokens / medians["generate"],
        "generation": medians["generate"] / whole,
        **{f"{name} ms": 1e3 * medians[name] for name in ("sleep", "train", "update")},
        "mean difference": mean,
        "largest": float(max(each.max() for each in differences)),
        "GiB awake": memory[-1][0],
        "asleep": memory[-1][1],
        "compilations": compile_count() - compiled,
    }
    case = f"GRPO loop, {sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e9:.2g}B parameters"
    if values["compilations"] or not mean < MEAN_DIFFERENCE[size.dtype]:
        return failed(case, "compilations after the first step, or other log probabilities", **values)
    return Row(case, values, outcome="ok")


def _in_use() -> float:
    """GiB of the device's memory; not a number where that is not known."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", float("nan")) / 2**30
