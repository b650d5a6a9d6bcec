"""A tiny Qwen 3 with random weights, in a folder and as Tunix's module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from flax import nnx

from tests.golden.weights import VARIANTS
from tests.text.conftest import byte_level, write

VARIANT = "qwen3_untied"


def write_folder(folder: Path, **changes: Any) -> Path:
    """Configuration and tokenizer, without weights."""
    tokenizer = byte_level()
    folder.mkdir(parents=True, exist_ok=True)
    config = {**VARIANTS[VARIANT], "vocab_size": tokenizer.get_vocab_size(), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return write(tokenizer, folder)


def tokenizer_of(folder: Path) -> Any:
    """Without a token for padding: Tunix then uses that for the end, as with Llama's tokenizers."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def actor_of(folder: Path, seed: int = 0) -> nnx.Module:
    """Tunix's module for the folder's configuration, with random weights."""
    from tunix.models.qwen3 import model

    hf = json.loads((folder / "config.json").read_text())
    config = model.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
    )
    actor: nnx.Module = model.Qwen3(config, rngs=nnx.Rngs(seed))
    keys = nnx.Rngs(seed + 1)

    def randomly(leaf: jax.Array) -> jax.Array:  # Tunix starts MLPs with zeros
        noise = jax.random.normal(keys(), leaf.shape, leaf.dtype)
        return 1 + 0.1 * noise if leaf.ndim == 1 else noise * (2.0 / leaf.shape[0] ** 0.5)

    nnx.update(actor, jax.tree.map(randomly, nnx.state(actor, nnx.Param)))
    return actor


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(
        (1, 1), ("fsdp", "tp"), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def per_token(
    actor: nnx.Module, prompts: Any, completions: Any, pad: int, eos: int, temperature: float
) -> jax.Array:
    """Tunix's own log probabilities of completions."""
    from tunix.rl import common

    graph, state = nnx.split(actor)
    logps: jax.Array = common.compute_per_token_logps(
        graph, state, prompt_tokens=jnp.asarray(prompts), completion_tokens=jnp.asarray(completions),
        pad_id=pad, eos_id=eos, temperature=temperature,
    )  # fmt: skip
    return logps
