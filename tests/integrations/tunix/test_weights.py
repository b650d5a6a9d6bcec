"""Weights of Tunix's models, by the names of a checkpoint: what Tunix loads from a folder comes back."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jengine import InvalidArgument, trainer_weights
from tests.extras import of_extra
from tests.golden.weights import VARIANTS, write_model

of_extra("tunix", "tunix")

from jengine.integrations.tunix.rollout import merged, named, state_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses old names of flax and JAX

# of Tunix's loader, by its model
LOADERS = {"gemma": "params_safetensors", "gemma3": "params_safetensors"}


def loaded(folder: Path, variant: str, family: str, **more: Any) -> nnx.Module:
    """Tunix's model, with the weights of a folder."""
    model = importlib.import_module(f"tunix.models.{family}.model")
    params = importlib.import_module(f"tunix.models.{family}.{LOADERS.get(family, 'params')}")
    hf = VARIANTS[variant]
    heads = hf["num_attention_heads"]
    known: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "vocab_size": hf["vocab_size"],
        "num_embed": hf["vocab_size"],
        "embed_dim": hf["hidden_size"],
        "hidden_dim": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "num_heads": heads,
        "head_dim": hf.get("head_dim", hf["hidden_size"] // heads),
        "num_kv_heads": hf["num_key_value_heads"],
        "rope_theta": int(hf["rope_theta"]),
        "norm_eps": hf["rms_norm_eps"],
        "num_experts": hf.get("num_experts"),
        "num_experts_per_tok": hf.get("num_experts_per_tok"),
        "weight_tying": hf["tie_word_embeddings"],
        "use_tied_embedding": hf["tie_word_embeddings"],
        **more,
    }
    names = {field.name for field in dataclasses.fields(model.ModelConfig)}
    config = model.ModelConfig(**{name: value for name, value in known.items() if name in names})
    built: nnx.Module = params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
    return built


GEMMA2: dict[str, Any] = {
    "final_logit_softcap": 1.0,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "attention_types": (None,) * 3,
}


@pytest.mark.parametrize(
    "variant, family, more",
    [
        ("llama_gqa", "llama3", {}),
        ("llama_tied", "llama3", {}),
        ("qwen2_untied", "qwen2", {}),
        ("qwen3_untied", "qwen3", {}),
        ("qwen3_moe", "qwen3", {}),
        ("gemma2", "gemma", GEMMA2),
        ("gemma3", "gemma3", {"param_dtype": jnp.float32, "sliding_window_size": 30}),
    ],
)
def test_what_tunix_loads_comes_back(tmp_path: Path, variant: str, family: str, more: dict[str, Any]) -> None:
    write_model(tmp_path, variant)
    found = trainer_weights(loaded(tmp_path, variant, family, **more), "tunix")
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_lora_parameters_are_added(tmp_path: Path) -> None:
    """To a model in which qwix has put them, at random."""
    qwix = of_extra("tunix", "qwix")
    write_model(tmp_path, "qwen3_untied")
    plain = loaded(tmp_path, "qwen3_untied", "qwen3")
    provider = qwix.LoraProvider(module_path=".*q_proj|.*o_proj|.*down_proj", rank=4, alpha=6.0)
    adapted = qwix.apply_lora_to_model(plain, provider, rngs=nnx.Rngs(0), **plain.get_model_input())
    lora = nnx.state(adapted, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(0), 64))
    lora = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape, x.dtype), lora)
    nnx.update(adapted, lora)
    base = {
        path: array for path, array in named(nnx.state(adapted, nnx.Param)).items() if "_lora_" not in path
    }
    whole = merged(base, named(lora), 6.0)
    assert sum(bool((whole[path] != base[path]).any()) for path in base) == 3 * 2
    nnx.update(plain, state_of(whole))
    tokens = jnp.arange(12)[None] * 5 % 96
    inputs = tokens, jnp.arange(12)[None], None, jnp.tril(jnp.ones((1, 12, 12), bool))
    np.testing.assert_allclose(plain(*inputs)[0], adapted(*inputs)[0], atol=1e-4, rtol=1e-4)

    with pytest.raises(
        InvalidArgument, match=r"^params='layers\.0\.attn\.o_proj\.w_lora_b': must be given to adapt"
    ):
        merged(base, {path: array for path, array in named(lora).items() if path.endswith("_a")}, 6.0)
