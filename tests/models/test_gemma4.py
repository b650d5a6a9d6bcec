"""Gemma 4's layers: what they keep of a token, whose keys they read, and what is rejected."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints.hugging_face import model_config
from jengine.execution.kv_cache import abstract_cache, page_bytes, views
from jengine.models import build
from jengine.models.cache import TOKENS, CacheGroup, homes, places
from jengine.models.config import ModelConfig
from jengine.models.gemma4 import at, kv_layer
from jengine.parallel.mesh import make_mesh
from pallas_kernels.cache.xla import page_write
from pallas_kernels.quantization.quantized import dequantize, quantize
from tests.golden.weights import VARIANTS

LARGE = {  # as Gemma 4 31B has them
    **{
        "model_type": "gemma4_text",
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
    },
    **{
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


def read(variant: str, **changes: Any) -> ModelConfig:
    config = VARIANTS[variant]
    return model_config(
        {
            name: value
            for name, value in {**config.get("text_config", config), **changes}.items()
            if value is not ...
        }
    )


def groups_of(config: ModelConfig) -> tuple[CacheGroup, ...]:
    return build(config, "bfloat16", 64).groups


def test_pages_have_no_gaps() -> None:
    """50 layers with a window keep 2 x 16 x 256 numbers of a token, the other ten half as many: two of those
    have one place.
    """
    groups = groups_of(model_config(LARGE))
    assert [(group.kind, len(group.layers), group.parts) for group in groups] == [("full", 10, 2)] + [
        ("window", 5, 1)
    ] * 10
    pool = places(groups, 0)
    assert {array.shape for place in pool for array in place} == {(16, TOKENS, 256)} and len(pool) == 5
    assert {group.token_bytes(2) for group in groups} == {5 * 2 * 4096 * 2}
    home = homes(groups)
    assert [home[layer] for layer in groups[0].layers] == [
        (0, place, part) for place in range(5) for part in range(2)
    ]


def test_a_part_of_a_place_is_its_layer_s_alone() -> None:
    groups = groups_of(read("gemma4"))
    (keys, _), tokens = places(groups, 0)[0], 4
    pool = np.arange(3 * np.prod(keys.page(tokens))).reshape(3, *keys.page(tokens))
    for group in groups:
        view, _ = views((jnp.asarray(pool),) * 2, group, tokens)
        assert view.shape == (3 * group.parts, *group.arrays[0].page(tokens))
        assert np.array_equal(np.asarray(view).reshape(pool.shape), pool)
    assert [group.parts for group in groups] == [1, 2, 2]


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_parts_of_a_page_keep_their_own_scales(kind: str) -> None:
    """Each group has a page, whose parts are written one after the other. Heads of 16 have twice as many
    scales as those of 32.
    """
    groups, tokens, rng = groups_of(read("gemma4")), 4, np.random.default_rng(0)
    declared = abstract_cache(groups, (len(groups) + 1,), tokens, np.dtype(kind), make_mesh(1))[0][0]
    place = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), declared)
    written = {}
    for page, group in enumerate(groups, 1):
        kv_heads, _, head_dim = group.arrays[0].shape
        for part in range(group.parts):
            new = jnp.asarray(rng.normal(size=(tokens, kv_heads, head_dim)) * 4.0**part, jnp.float32)
            where = jnp.full(tokens, page * group.parts + part), jnp.arange(tokens)
            own = tuple(page_write(pages, new, *where) for pages in views(place, group, tokens))
            place = jax.tree.map(lambda mine, like: mine.reshape(like.shape), own, place)
            written[group, int(where[0][0])] = new
    assert len(written) == 5
    for (group, page), new in written.items():
        for pages in views(place, group, tokens):
            got = dequantize(dataclasses.replace(pages, scale=pages.scale[:, : new.shape[1]]))[page].swapaxes(
                0, 1
            )
            assert np.array_equal(got, dequantize(quantize(new, kind)))


def test_an_eight_bit_page_holds_a_scale_for_each_of_the_smaller_heads() -> None:
    groups, tokens = groups_of(model_config(LARGE)), 16
    assert page_bytes(groups, 0, tokens, np.dtype("int8"), 1) == 5 * 2 * tokens * 16 * (256 + 4)
    assert page_bytes(groups, 0, tokens, np.dtype("int8"), 4) == 5 * 2 * tokens * 4 * (256 + 4)


def test_layers_that_share_keys_and_values() -> None:
    config = read("gemma4")
    assert [kv_layer(config, i) for i in range(7)] == [0, 1, 2, 3, 3, 3, 1]
    assert {layer for group in groups_of(config) for layer in group.layers} == {0, 1, 2, 3}
    assert [at(config, i).intermediate_size for i in range(7)] == [48] * 4 + [96] * 3


def test_heads_by_kind_of_layer() -> None:
    config = read("gemma4_text")
    assert [(at(config, i).head_dim, at(config, i).num_kv_heads) for i in range(4)] == [(16, 4)] * 2 + [
        (32, 2)
    ] * 2
    newer = {str(i).zfill(2): {"head_dim": 32, "num_key_value_heads": 2} for i in (2, 3)}
    assert (
        read("gemma4_text", per_layer_config=newer, global_head_dim=..., num_global_key_value_heads=...)
        == config
    )
    defaults = read("gemma4_text", rope_parameters=..., layer_types=..., num_hidden_layers=8)
    assert [i for i in range(8) if defaults.window(i) is None] == [5, 7]
    assert (defaults.rope.theta, defaults.rope.local_theta) == (1e6, 1e4)
    assert defaults.rope.scaling is not None and (
        defaults.rope.scaling.kind,
        defaults.rope.scaling.share,
    ) == ("proportional", 0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        (
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "layer_types ends with 'sliding_attention'",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 leaves no other layer with full_attention"),
        (
            {"per_layer_config": {"00": {"head_dim": 8}}},
            "per_layer_config may only change the number and size of heads",
        ),
        ({"attn_logit_softcapping": 3.0}, "attn_logit_softcapping is not supported"),
    ],
)
def test_what_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read("gemma4_text", **changes)
