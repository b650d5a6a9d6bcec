"""The rollout engine, against Tunix's own sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine import InvalidArgument
from tests.engine.on_demand import on_demand
from tests.extras import of_extra

of_extra("tunix", "tunix")

from tunix.generate.tokenizer_adapter import TokenizerAdapter  # noqa: E402
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig  # noqa: E402
from tunix.rl.rollout.vanilla_rollout import VanillaRollout  # noqa: E402

from jengine.integrations.tunix.rollout import JengineRollout  # noqa: E402
from tests.integrations.tunix.models import actor_of, mesh, per_token, tokenizer_of, write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses old names of flax and JAX

PROMPTS = ["def", "The library of", "def", "x = [1, 2]"]
GREEDY = RolloutConfig(
    max_tokens_to_generate=12, temperature=0.0, max_prompt_length=32, kv_cache_size=64, return_logprobs=True
)
SEEDED = dataclasses.replace(GREEDY, temperature=0.7, seed=jax.random.PRNGKey(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def actor(folder: Path) -> nnx.Module:
    return actor_of(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return TokenizerAdapter(tokenizer_of(folder))


def started(folder: Path, actor: nnx.Module, tokenizer: Any, **options: Any) -> JengineRollout:
    with on_demand():
        return JengineRollout(
            rollout_actor=actor,
            tokenizer=tokenizer,
            mesh=mesh(),
            rollout_config=GREEDY,
            model=folder,
            **{"max_num_seqs": 8, "page_size": 16, "tile_size": 64, **options},
        )


@pytest.fixture(scope="module")
def rollout(folder: Path, actor: nnx.Module, tokenizer: Any) -> Iterator[JengineRollout]:
    rollout = started(folder, actor, tokenizer)
    yield rollout
    rollout.close()


def vanilla(actor: nnx.Module, tokenizer: Any) -> VanillaRollout:
    config: Any = actor.config  # type: ignore[attr-defined]
    return VanillaRollout(
        actor, tokenizer, CacheConfig(64, config.num_layers, config.num_kv_heads, config.head_dim)
    )


def test_tokens_and_log_probabilities_are_those_of_tunix(
    rollout: JengineRollout, actor: nnx.Module, tokenizer: Any
) -> None:
    """Greedily. Tunix's sampler drops the token at which a completion ends."""
    eos = [int(tokenizer.eos_id()), 77]
    ours = rollout.generate(PROMPTS, dataclasses.replace(GREEDY, eos_tokens=eos))
    theirs = vanilla(actor, tokenizer).generate(
        PROMPTS, dataclasses.replace(GREEDY, eos_tokens=eos, top_p=None)
    )
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    assert ours.text == theirs.text
    assert ours.logprobs is not None and theirs.logprobs is not None
    for own, other, logprobs, others in zip(
        ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True
    ):
        np.testing.assert_array_equal(own[: len(other)], other)
        assert len(own) == len(other) == 12 or (len(own) == len(other) + 1 and own[-1] in eos)
        np.testing.assert_allclose(logprobs[: len(others)], others, atol=2e-4)


def test_samples_have_the_log_probabilities_of_the_policy(
    rollout: JengineRollout, actor: nnx.Module, tokenizer: Any
) -> None:
    found = rollout.generate(PROMPTS, SEEDED)
    assert found.tokens[0].tolist() != found.tokens[2].tolist()  # equal prompts get different samples
    again = rollout.generate(PROMPTS[::-1], SEEDED).tokens[::-1]
    assert [again[at].tolist() for at in (2, 1, 0, 3)] == [one.tolist() for one in found.tokens]

    pad, completions = rollout.pad_id(), np.full((4, 12), rollout.pad_id(), np.int32)
    for row, tokens in zip(completions, found.tokens, strict=True):
        row[: len(tokens)] = tokens
    expected = per_token(actor, found.left_padded_prompt_tokens, completions, pad, rollout.eos_id(), 0.7)
    assert found.logprobs is not None
    for own, other in zip(found.logprobs, expected, strict=True):
        np.testing.assert_allclose(own, other[: len(own)], atol=2e-4)

    scored = rollout.get_per_token_logps(
        jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(completions)
    )
    own = vanilla(actor, tokenizer).get_per_token_logps(
        jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(completions)
    )
    real = completions != pad
    np.testing.assert_allclose(scored[real], own[real], atol=2e-4)
    assert (np.asarray(scored)[~real] == 0).all()


def test_new_parameters_are_taken_over(folder: Path, tokenizer: Any) -> None:
    first, second = actor_of(folder, 5), actor_of(folder, 6)
    rollout = started(folder, first, tokenizer)
    try:
        before = rollout.generate(PROMPTS, GREEDY)
        rollout.update_params(nnx.state(second, nnx.Param), (nnx.Param,))
        found = rollout.generate(PROMPTS, GREEDY)
        theirs = vanilla(second, tokenizer).generate(PROMPTS, dataclasses.replace(GREEDY, top_p=None))
        assert found.text == theirs.text != before.text
        with pytest.raises(InvalidArgument, match=r"^params='layers\.0\.attn\.q_proj\.w_lora_a': are LoRA"):
            rollout.update_params(
                nnx.from_flat_state(
                    [(("layers", 0, "attn", "q_proj", "w_lora_a"), nnx.LoRAParam(jnp.ones(3)))]
                )
            )
        assert rollout.generate(PROMPTS, GREEDY).text == found.text
    finally:
        rollout.close()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"rollout_vllm_max_num_seqs": 4}, r"^rollout_config\.rollout_vllm_max_num_seqs=4: of other rollout"),
        ({"rollout_sglang_jax_page_size": 16}, r"^rollout_config\.rollout_sglang_jax_page_size=16: of other"),
        (
            {"tensor_parallel_size": 2},
            r"^rollout_config\.tensor_parallel_size=2: must be -1 or 1: the engine",
        ),
        ({"data_parallel_size": 2}, r"^rollout_config\.data_parallel_size=2: must be -1 or 1"),
        ({"temperature": -1.0}, r"^temperature=-1\.0: must be"),
        ({"top_p": 0.0}, r"^top_p=0\.0: must be in"),
    ],
)
def test_what_the_engine_lacks_is_refused(
    rollout: JengineRollout, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=match):
        rollout.generate(PROMPTS, dataclasses.replace(GREEDY, **changes))


def test_a_model_in_host_memory_is_refused(folder: Path, tokenizer: Any) -> None:
    actor = actor_of(folder)
    host = jax.device_put(nnx.state(actor), jax.NamedSharding(mesh(), jax.P(), memory_kind="pinned_host"))
    nnx.update(actor, host)
    with pytest.raises(InvalidArgument, match=r"^cluster_config\.offload_to_cpu=True: must be False"):
        started(folder, actor, tokenizer)


def test_a_prompt_that_is_too_long_is_refused(rollout: JengineRollout) -> None:
    with pytest.raises(InvalidArgument, match="max_model_len"):
        rollout.generate(["def " * 60], GREEDY)
    long = rollout.generate(["x" * 45], dataclasses.replace(GREEDY, max_tokens_to_generate=2))
    assert long.left_padded_prompt_tokens.shape == (
        1,
        64,
    )  # as Tunix pads what is longer than max_prompt_length
    with pytest.raises(InvalidArgument, match=r"^images=.*: must be left out"):
        rollout.generate(PROMPTS, GREEDY, images=[1])
