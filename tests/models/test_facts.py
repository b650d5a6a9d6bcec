"""What models declare of themselves: what layers cache, what programs need, and what depends on other
rows.
"""

from __future__ import annotations

import functools
from typing import cast

import jax
import pytest

from jengine.capacity.planning.memory import TargetDevice
from jengine.checkpoints.hugging_face import model_config
from jengine.models import Model, build
from jengine.models.adapters import bare
from jengine.models.cache import TOKENS, CacheEntry, PageArray, cache_groups
from jengine.models.facts import Working
from tests.golden.weights import VARIANTS

KEYS = PageArray((2, TOKENS, 16))


def entry(
    kind: str, window: int | None = None, reads: int | None = None, array: PageArray = KEYS
) -> CacheEntry:
    return CacheEntry(kind=kind, arrays=(array,), operations=1, channels=1, window=window, reads=reads)  # type: ignore[arg-type]


@functools.cache
def declared(variant: str, shards: int = 1) -> Model:
    return build(model_config(VARIANTS[variant]), "float32", 64, shards=shards)


def test_layers_are_grouped_by_what_they_declare() -> None:
    state = entry("state", array=PageArray((4, 8, 8), dtype="float32"))
    latent = entry("latent", array=PageArray((1, TOKENS, 40), sharded=None))
    groups = cache_groups(
        [entry("full"), entry("window", 8), entry("window", 8, reads=1), state, entry("window", 8)]
    )
    assert [(group.kind, group.layers, group.pool) for group in groups] == [
        *[("full", (0,), 0), ("window", (1,), 0), ("window", (4,), 0)],
        ("state", (3,), 1),
    ]
    assert [(group.kind, group.layers) for group in cache_groups([latent, state, latent])] == [
        ("latent", (0, 2)),
        ("state", (1,)),
    ]


def test_layers_declare_their_queries() -> None:
    """Of 8 query heads with 2 kv heads, a device of two has four, and one of four as well, since kv heads are
    copied.
    """
    queries = [declared("llama_gqa", shards).groups[0].queries for shards in (1, 2, 4)]
    assert [(one.heads, one.dim) for one in queries if one is not None] == [(8, 8), (4, 8), (2, 8)]
    assert [declared(name).groups[0].queries.soft_cap for name in ("gemma2", "gemma3")] == [3.0, None]  # type: ignore[union-attr]
    assert [declared(name).groups[0].queries.slopes for name in ("bloom", "gpt2")] == [True, False]  # type: ignore[union-attr]
    latent = declared("deepseek_v3").groups[0].queries
    assert latent is not None and (latent.heads, latent.dim, latent.rank) == (4, 32 + 12, 32)


def test_operations_by_hand() -> None:
    """A query's product with a key and a probability's with a value: a multiplication and an addition for
    each channel.
    """
    assert {one.operations for one in declared("llama_gqa").entries} == {4 * 8 * 8}
    assert {one.operations for one in declared("deepseek_v3").entries} == {2 * 4 * (44 + 32)}
    assert [one.operations for one in declared("lfm2").entries] == [0, 4 * 64, 0, 4 * 64]
    assert [one.operations for one in declared("qwen3_next").entries] == [
        6 * 4 * 16 * 12,
        4 * 4 * 16,
        6 * 4 * 16 * 12,
    ]


@pytest.mark.parametrize(
    ("variant", "beside", "layer"),
    [
        ("llama_gqa", Working(), Working(4 * 112)),
        ("gpt2", Working(), Working(4 * 112)),
        ("gemma4", Working(3 * 7 * 12), Working(4 * 96)),  # wide in layers that share keys and values
        ("gemma3n", Working(3 * 6 * 12 + 8 * 2 * 64), Working(4 * 48)),
        ("mixtral", Working(), Working(4 * 48, 4 * (8 * 4 + 10 * 2) * (2 * 64 + 3 * 48 + 3 * 4))),
    ],
)
def test_what_ten_tokens_need(variant: str, beside: Working, layer: Working) -> None:
    assert declared(variant).working(10) == (beside, layer)


def test_what_depends_on_other_rows() -> None:
    cpu, gpu = jax.devices("cpu")[0], cast(jax.Device, TargetDevice(0, "GPU", "9.0"))
    for variant in ("llama_gqa", "deepseek_v3", "qwen3_next", "mixtral"):
        assert declared(variant).batch_dependence(cpu) is None
    assert declared("llama_gqa").batch_dependence(gpu) is None
    of_experts = declared("mixtral").batch_dependence(gpu)
    assert of_experts is not None and of_experts.startswith("experts, whose products XLA may sum")
    sizes = {**VARIANTS["mixtral"], "hidden_size": 128, "intermediate_size": 128}
    for shards, allowed in ((1, True), (2, True), (4, False)):
        of_experts = build(model_config(sizes), "bfloat16", 64, shards=shards).batch_dependence(gpu)
        assert (of_experts is None) is allowed, of_experts
    ampere = cast(jax.Device, TargetDevice(0, "GPU", "8.0"))
    for quantization, size, allowed in (("int8", 128, True), ("int4", 192, True), (None, 192, False)):
        sizes |= {"hidden_size": size, "intermediate_size": size}
        model = build(model_config(sizes), "bfloat16", 64, quantization, group_size=32)
        assert (model.batch_dependence(ampere) is None) is allowed, (quantization, size)


def test_layers_that_compute_attention_and_mlp_at_once() -> None:
    assert {
        name for name in ("falcon_7b", "falcon_serial", "cohere", "phi", "gpt2") if declared(name).parallel
    } == {
        *("falcon_7b", "cohere", "phi"),
    }


@pytest.mark.parametrize(
    "part", ["", "model.", "model.language_model.", "language_model.model.", "model.text_model."]
)
def test_adapters_name_modules_of_text_models(part: str) -> None:
    """Also of SmolVLM, whose adapters could not be loaded."""
    assert bare(f"{part}layers.0.self_attn.q_proj", "model.") == "layers.0.self_attn.q_proj"
