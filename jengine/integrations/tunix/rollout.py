"""jengine as Tunix's rollout engine.

from functools import partial
from jengine.integrations.tunix.rollout import JengineRollout

cluster = rl_cluster.RLCluster(
    actor=actor, tokenizer=tokenizer, cluster_config=rl_cluster.ClusterConfig(
        rollout_engine=partial(JengineRollout, model="Qwen/Qwen3-0.6B", max_num_seqs=64),
        rollout_config=base_rollout.RolloutConfig(max_tokens_to_generate=256, kv_cache_size=1024), ...
    ),
)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jengine import (
    LLM,
    CompletionOutput,
    InvalidArgument,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
    trainer_weights,
)

LORA = re.compile(r"_lora_[ab]$")  # parameters that adapt the one of the same name without this


def named(state: nnx.State[Any, Any]) -> dict[str, jax.Array]:
    """A state's arrays by their paths, such as `layers.0.attn.q_proj.w`."""
    return {
        ".".join(str(part) for part in path): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def state_of(arrays: Mapping[str, jax.Array]) -> nnx.State[Any, Any]:
    """The reverse of `named`."""
    keys = {path: tuple(int(part) if part.isdigit() else part for part in path.split(".")) for path in arrays}
    return nnx.from_flat_state([(keys[path], nnx.Param(array)) for path, array in arrays.items()])


def merged(base: Mapping[str, jax.Array], lora: Mapping[str, jax.Array], alpha: float) -> dict[str, Any]:
    """Adds the products of LoRA parameters, scaled by alpha / rank, to the parameters that they adapt (Hu et
    al., 2021).

    Args:
        base: the other parameters, as `named` gives them.
        lora: pairs `NAME_lora_a` [*in, rank] and `NAME_lora_b` [rank, *out] for parameters NAME [*in, *out].

    Raises:
        InvalidArgument: no parameter of that name and shape.
    """
    out = dict(base)
    for name in sorted({LORA.sub("", path) for path in lora}):
        try:
            a, b, plain = lora[f"{name}_lora_a"], lora[f"{name}_lora_b"], base[name]
        except KeyError as missing:
            raise InvalidArgument("params", missing.args[0], f"must be given to adapt {name}") from None
        if a.shape[:-1] + b.shape[1:] != plain.shape:
            limit = f"have shapes {a.shape} and {b.shape}, whose product does not adapt {plain.shape}"
            raise InvalidArgument("params", f"{name}_lora_a and _b", limit)
        out[name] = _add(plain, a, b, alpha / a.shape[-1])
    return out


@jax.jit
def _add(plain: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    product = jax.numpy.tensordot(a, b, 1, preferred_element_type=jax.numpy.float32)
    return (plain + scale * product).astype(plain.dtype)


# fields of RolloutConfig that other engines alone have
OTHERS = ("rollout_vllm_", "rollout_sglang_jax_", "rollout_mapping_config")
ALONE = "of other rollout engines: keep its default, and pass options of jengine's engine to JengineRollout"
OFFLOADED = "pinned_host"  # the kind of memory to which Tunix moves models
SEEDS = 2**64  # numbers of a SamplingParams.seed


class JengineRollout(BaseRollout):  # type: ignore[misc]  # tunix's types are not checked
    """A rollout engine that lives in the trainer's process, on the trainer's mesh.

    Args:
        rollout_actor: the policy, an nnx module. Tunix passes it, and the next three.
        tokenizer: Tunix's adapter of a tokenizer.
        mesh: the devices to use. The engine uses them as one axis.
        rollout_config: gives defaults of options: kv_cache_size for max_model_len, data_type for dtype.
        model: a folder with the model's configuration and tokenizer, or a hub id; see LLM.
        weights: turns the policy's parameters, by their paths in its state, into the tensors of a checkpoint.
            None: as `trainer_weights` does with the layout `tunix`.
        lora_alpha: the alpha of the policy's LoRA parameters, which are added to the weights that they adapt.
        options: of the engine, see EngineConfig.

    Raises:
        InvalidArgument: an option, a field of rollout_config or a parameter that does not fit.
        ModelError, OutOfMemory: as LLM.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh,
        rollout_config: RolloutConfig,
        *,
        model: str | Path,
        weights: Callable[[nnx.State[Any, Any]], Mapping[str, Any]] | None = None,
        lora_alpha: float | None = None,
        **options: Any,
    ) -> None:
        self._actor, self._tokenizer, self.mesh = rollout_actor, tokenizer, mesh
        self._weights, self._lora_alpha = weights or partial(trainer_weights, layout="tunix"), lora_alpha
        _check(rollout_config, mesh)
        state = nnx.state(rollout_actor, nnx.Param)
        if any(array.sharding.memory_kind == OFFLOADED for array in named(state).values()):
            limit = "must be False: the engine takes weights from the devices"
            raise InvalidArgument("cluster_config.offload_to_cpu", True, limit)
        options = {
            "max_model_len": rollout_config.kv_cache_size,
            "weight_updates": True,
            "logprobs_mode": "processed_logprobs",
            **(
                {}
                if rollout_config.data_type is None
                else {"dtype": str(jnp.dtype(rollout_config.data_type))}
            ),
            **options,
        }
        self.llm = LLM(
            model,
            mesh=Mesh(mesh.devices.reshape(-1), ("tensor",)),
            params=self._tensors(state),
            progress=False,
            **options,
        )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **options: Any) -> RolloutOutput:
        """Completes every prompt.

        A completion's tokens end with its end-of-sequence token, its text before it. The j-th of equal
        prompts in the list gets the seed plus j. Log probabilities are those of the distribution that tokens
        are sampled from: after temperature, top_k and top_p.

        Raises:
            InvalidArgument: a field of rollout_config that the engine does not have, or a prompt that is too
                long.
        """
        for name, value in options.items():
            raise InvalidArgument(name, value, "must be left out: rollout_config has all options")
        _check(rollout_config, self.mesh)
        tokens = [self._encoded(prompt) for prompt in prompts]
        ends = [*(rollout_config.eos_tokens or [self.eos_id()])]
        equal: Counter[tuple[int, ...]] = Counter()
        params = []
        for prompt in tokens:
            params.append(_sampling(rollout_config, ends, equal[tuple(prompt)]))
            equal[tuple(prompt)] += 1
        outputs = [output.outputs[0] for output in self._generate(tokens, params)]
        completions = [np.asarray(output.token_ids, np.int32) for output in outputs]
        return RolloutOutput(
            text=[self._tokenizer.decode(_without_end(each, ends).tolist()) for each in completions],
            logits=[],
            tokens=completions,
            left_padded_prompt_tokens=_left_padded(tokens, rollout_config.max_prompt_length, self.pad_id()),
            logprobs=[_logprobs(output) for output in outputs] if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """The engine's log probabilities of completions, at temperature 1.

        Args:
            prompt_tokens: int32 [rows, length], padded on the left.
            completion_tokens: int32 [rows, length], padded on the right.

        Returns:
            float32 [rows, length] of completion_tokens; 0 for padding.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, out = self.pad_id(), np.zeros(completions.shape, np.float32)
        starts = [int(np.argmax(row != pad)) for row in prompts]
        lengths = [int(np.max(np.nonzero(row != pad)[0], initial=-1)) + 1 for row in completions]
        rows = [
            [*prompt[start:].tolist(), *completion[:length].tolist()]
            for prompt, start, completion, length in zip(prompts, starts, completions, lengths, strict=True)
        ]
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for row, tokens, length, output in zip(
            out, rows, lengths, self._generate(rows, [scored] * len(rows)), strict=True
        ):
            of_tokens = zip(tokens[-length:], (output.prompt_logprobs or [])[-length:], strict=True)
            row[:length] = [each[token].logprob for token, each in of_tokens if each] if length else []
        return jnp.asarray(out)

    def update_params(self, params: nnx.State[Any, Any], filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes over the policy's parameters, between two steps of the engine. Nothing is compiled.

        Args:
            params: all parameters, or the LoRA parameters alone.
            filter_types: their types; Tunix passes them, and the parameters' names already say it.

        Raises:
            InvalidArgument, ModelError: a parameter does not fit; the engine keeps the weights that it has.
        """
        self.llm.update_weights(self._tensors(params))

    def pad_id(self) -> int:
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: the engine's weights are not Tunix's, which therefore updates them."""

    def close(self) -> None:
        """Frees the engine's memory."""
        self.llm.close()

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        each: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(each, params, use_tqdm=False)
        for output in outputs:
            output.require_answer()
        return outputs

    def _encoded(self, prompt: str) -> list[int]:
        """With one token for the beginning, as Tunix's samplers do."""
        start = self._tokenizer.bos_id()
        tokens = [*([start] if start else []), *self._tokenizer.encode(prompt)]
        return [int(token) for token in self._tokenizer.dedup_bos_ids(tokens)]

    def _tensors(self, state: nnx.State[Any, Any]) -> Mapping[str, Any]:
        arrays = named(state)
        lora = {path: array for path, array in arrays.items() if LORA.search(path)}
        if not lora:
            return self._weights(state)
        if self._lora_alpha is None:
            limit = "are LoRA parameters: JengineRollout needs `lora_alpha` to add them to the weights"
            raise InvalidArgument("params", next(iter(lora)), limit)
        rest = named(nnx.state(self._actor, nnx.Param)) | arrays
        base = {path: array for path, array in rest.items() if not LORA.search(path)}
        return self._weights(state_of(merged(base, lora, self._lora_alpha)))


def _check(config: RolloutConfig, mesh: Mesh) -> None:
    """
    Raises:
        InvalidArgument: a field that the engine does not have.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name.startswith(OTHERS) and value != _default(field):
            raise InvalidArgument(f"rollout_config.{field.name}", value, ALONE)
    for name, allowed in (
        ("tensor_parallel_size", (-1, mesh.devices.size)),
        ("data_parallel_size", (-1, 1)),
        ("expert_parallel_size", (1,)),
    ):
        if getattr(config, name) not in allowed:
            limit = (
                f"must be {' or '.join(map(str, allowed))}: the engine shards tensors over the mesh's devices"
            )
            raise InvalidArgument(f"rollout_config.{name}", getattr(config, name), limit)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _sampling(config: RolloutConfig, ends: Sequence[int], nth: int) -> SamplingParams:
    """For the nth of equal prompts."""
    return SamplingParams(
        max_tokens=config.max_tokens_to_generate,
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=0 if config.top_k is None else config.top_k,
        seed=None if config.seed is None else (_number(config.seed) + nth) % SEEDS,
        stop_token_ids=tuple(ends),
        ignore_eos=True,
        logprobs=0 if config.return_logprobs else None,
        detokenize=False,
    )


def _number(seed: Any) -> int:
    """A seed as a whole number, from a number or a JAX key."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).reshape(-1)
    return int(sum(int(word) << 32 * place for place, word in enumerate(words[::-1])))


def _logprobs(output: CompletionOutput) -> np.ndarray:
    each = zip(output.token_ids, output.logprobs or [], strict=True)
    return np.asarray([entry[token].logprob for token, entry in each], np.float32)


def _without_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    return tokens[:-1] if tokens.size and int(tokens[-1]) in ends else tokens


def _left_padded(prompts: Sequence[Sequence[int]], length: int, pad: int) -> np.ndarray:
    """int32 [prompts, length], or the next power of two if a prompt is longer, as Tunix's samplers do."""
    longest = max(len(prompt) for prompt in prompts)
    width = length if longest <= length else 1 << (longest - 1).bit_length()
    out = np.full((len(prompts), width), pad, np.int32)
    for row, prompt in zip(out, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return out
