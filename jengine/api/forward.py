"""A model as a differentiable function of its checkpoint's tensors, for trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints import read_config, resolve
from jengine.checkpoints.in_memory import PLACE, assembled
from jengine.checkpoints.stored import Tensor, dense
from jengine.checkpoints.weights import read
from jengine.models import build
from jengine.models.pieces import Piece
from jengine.models.whole_sequences import WholeSequences
from pallas_kernels.devices import differentiable


class Forward:
    """The model that an engine runs, as a function that JAX can differentiate, jit and shard.

    A trainer that uses it trains the very definition of the model that generates its rollouts. It takes the
    weights as LLM(params=...) and `update_weights` do: a dict from the names of a checkpoint's tensors to
    arrays, which may be sharded in any way.

    Args:
        model: `demo`, a folder in Hugging Face's layout, or a hub id.
        dtype: of activations, and of weights in products; weights of another dtype are converted.
        max_model_len: the most tokens of a sequence; None: the model's.

    Raises:
        ModelError: the model cannot be read or is not supported: a quantized one, a prefix-LM, or one whose
            layers have a recurrent state.

    Examples:
        >>> forward = Forward("demo")
        >>> params = forward.load()
        >>> loss = lambda params, tokens: -forward.logprobs(params, tokens).mean()
        >>> gradients = jax.jit(jax.grad(loss))(params, tokens)
    """

    def __init__(
        self, model: str | Path = "demo", *, dtype: str = "float32", max_model_len: int | None = None
    ) -> None:
        self._folder = resolve(str(model))
        config = read_config(self._folder)
        self.max_model_len = max_model_len or config.max_position
        self._model = build(config, dtype, self.max_model_len)
        reason = (
            "its layers have a recurrent state"
            if any(group.kind == "state" for group in self._model.groups)
            else "the tokens of a prompt see each other (prefix_lm)"
            if config.prefix_lm
            else f"its weights are quantized ({self._model.quantized})"
            if self._model.quantized
            else None
        )
        if reason is not None:
            raise ModelError(f"has no differentiable function: {reason}", file=self._folder)

    def load(self, dtype: jax.typing.DTypeLike = "float32") -> dict[str, jax.Array]:
        """The folder's tensors, on the default device.

        Raises:
            ModelError: see LLM.
        """
        tensors = read(self._folder, self._model)
        return {name: jnp.asarray(dense(tensor.array), dtype) for name, tensor in tensors.items()}

    def logits(self, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        """int32 [rows, length] -> float32 [rows, length, vocab].

        Attention is causal, so padding on the right changes nothing before it.

        Raises:
            InvalidArgument: tokens have another form, or are too many.
            ModelError: a tensor is missing, unknown, or has another shape.
        """
        self._check(tokens)
        rows, length = tokens.shape
        with differentiable():
            module = self._model.bind(self._params(params))
            positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
            hidden = module.hidden(tokens.reshape(-1).astype(jnp.int32), positions, WholeSequences(rows))
            logits = module.logits(hidden)[:, : self._model.config.vocab_size]
        return logits.reshape(rows, length, -1)

    def logprobs(self, params: Mapping[str, Any], tokens: jax.Array, temperature: float = 1.0) -> jax.Array:
        """The log probability of each token but the first, given those before it: int32 [rows, length] ->
        float32 [rows, length - 1]. Raises as `logits`.

        Args:
            temperature: divides the logits, as sampling does; rollouts report such log probabilities with
                logprobs_mode="processed_logprobs".
        """
        logits = self.logits(params, tokens)[:, :-1] / temperature
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    @property
    def indivisible(self) -> str:
        """Why `hidden_states` cannot be computed; empty if it can."""
        module: Any = self._model.module
        return str(module.indivisible)

    def hidden_states(self, params: Mapping[str, Any], tokens: jax.Array) -> list[jax.Array]:
        """int32 [rows, length] -> [rows, length, hidden] each: the embeddings, then each layer's output, the
        last one after the final norm, as transformers' `output_hidden_states`.

        Raises:
            InvalidArgument, ModelError: as `logits`, or layers read more than the output of the one before.
        """
        self._check(tokens)
        if self.indivisible:
            raise ModelError(f"has no hidden states by layer: {self.indivisible}", file=self._folder)
        (rows, length), states = tokens.shape, list[jax.Array]()
        with differentiable():
            module: Any = self._model.bind(self._params(params))
            positions, attend = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows), WholeSequences(rows)
            states.append(module.enter(tokens.reshape(-1).astype(jnp.int32), positions, attend))
            for layer in range(len(module.layers)):
                states.append(module.through(states[-1], positions, attend, range(layer, layer + 1)))
            states[-1] = module.leave(states[-1])
        return [state.reshape(rows, length, -1) for state in states]

    def _check(self, tokens: jax.Array) -> None:
        if tokens.ndim != 2 or tokens.shape[1] > self.max_model_len:
            raise InvalidArgument(
                "tokens", tokens.shape, f"must be [rows, length], at most {self.max_model_len} long"
            )

    def _params(self, params: Mapping[str, Any]) -> Any:
        """The parameters, which consist of parts of a checkpoint's tensors."""
        tensors = read(
            self._folder, self._model, {name: Tensor(PLACE, array) for name, array in params.items()}
        )

        def parameter(target: jax.ShapeDtypeStruct, source: tuple[Piece, ...]) -> jax.Array:
            arrays = [jnp.asarray(tensors[piece.name].array) for piece in source]
            places = tuple((at, piece._replace(name="")) for at, piece in enumerate(source))
            return assembled(arrays, shape=target.shape, dtype=str(target.dtype), places=places)

        return jax.tree.map(parameter, self._model.params, self._model.sources)
