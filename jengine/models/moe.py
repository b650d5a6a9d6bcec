"""Mixture of experts: its sizes, and the module that routes tokens to experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.facts import Working
from jengine.models.family import Fields
from jengine.models.layers import GATED, GatedMlp, dense, matrix, value, whole_matrix
from jengine.models.pieces import EVERY, Piece
from jengine.parallel.collectives import DATA, TENSOR, all_reduce, gather_rows, reduce_scatter, shard_index
from pallas_kernels.devices import traced_for, traced_for_cpu
from pallas_kernels.elementwise.activations import gated
from pallas_kernels.products.dispatch import why_product_unsupported
from pallas_kernels.products.groups import counted, grouped
from pallas_kernels.products.support import why_sizes_unsupported
from pallas_kernels.products.weight import Weight

MAX_EXPERTS = 4096
MAX_BLOCK = 64  # maximum rows per block
EXPERTS = DATA, TENSOR  # axes over which whole experts are divided


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Sizes of experts, and how many of them a token uses.

    Attributes:
        layers: which layers route tokens to experts.
        count, per_token: number of experts in a layer, and how many of them a token uses.
        size: an expert's intermediate size.
        shared_size: intermediate size of the expert that computes all tokens; 0: there is none.
        normalize: the chosen experts' probabilities are scaled to a sum of 1.
    """

    layers: tuple[int, ...]
    count: int
    per_token: int
    size: int
    shared_size: int = 0
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.count > MAX_EXPERTS:
            raise ModelError(f"num_experts={self.count} must be at most {MAX_EXPERTS}")
        if self.layers and not 1 <= self.per_token <= self.count:
            raise ModelError(
                f"num_experts_per_tok={self.per_token} must be from 1 to {self.count}, the experts"
            )


def experts_everywhere(
    fields: Mapping[str, Any],
    count: int,
    per_token: int,
    size: int | None = None,
    shared_size: int = 0,
    *,
    normalize: bool = True,
) -> MixtureOfExperts:
    """Experts in every layer, by default of an MLP's size; `fields` are those of ModelConfig."""
    return MixtureOfExperts(
        layers=tuple(range(fields["num_layers"])),
        count=int(count),
        per_token=int(per_token),
        size=fields["intermediate_size"] if size is None else int(size),
        shared_size=int(shared_size),
        normalize=normalize,
    )


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Whether a layer routes tokens to experts."""
    experts = config.find(MixtureOfExperts)
    return experts is not None and layer in experts.layers


class Experts(nnx.Module):
    """A weighted sum of the gated MLPs that a router picks for each token, and an MLP that all tokens share,
    if there is one.

    Attributes:
        router_name, shared_name: in the checkpoint.
        stacked: names of the two tensors that hold all experts: gate and up [experts, 2 * size, hidden], and
            down [experts, hidden, size]. None: the checkpoint has separate tensors for each expert.
        transposed, either: whether the last two axes of these tensors are, or may be, swapped; see Piece.
    """

    router_name, shared_name = "gate", "shared_experts"
    stacked: tuple[str, str] | None = None
    transposed = either = False
    gate_up_bias: nnx.Param[jax.Array] | None = None
    down_bias: nnx.Param[jax.Array] | None = None
    shared: GatedMlp | None = None

    def __init__(
        self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, parts: tuple[str, ...] = GATED
    ) -> None:
        """`parts` are the checkpoint's names of gate, up and down."""
        self.config, self.sizes, self.parts = config, config.part(MixtureOfExperts), parts
        self.experts_per_token, self.num_experts, self.dtype = self.sizes.per_token, self.sizes.count, dtype
        self.declare(dtype, name)

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        """Declares the parameters and their checkpoint tensors."""
        (experts, size), hidden = self.laid, self.config.hidden_size
        router = f"{name}.{self.router_name}.weight"
        self.router = whole_matrix(router, dtype, self.sizes.count, hidden, exact=True)
        gate_up, down = self.sources(name)
        self.gate_up = matrix((experts, size, 2, hidden), dtype, ("experts", "ffn", None, None), *gate_up)
        self.down = matrix((experts, hidden, size), dtype, ("experts", None, "ffn"), *down)
        if self.sizes.shared_size:
            shared = dataclasses.replace(
                self.config, intermediate_size=self.sizes.shared_size, mlp_bias=False
            )
            self.shared = GatedMlp(shared, dtype, f"{name}.{self.shared_name}")

    def sources(self, name: str) -> tuple[list[Piece], list[Piece]]:
        """The checkpoint tensors of the experts' matrices: of gate and up, and of down."""
        count, size, hidden = self.sizes.count, self.sizes.size, self.config.hidden_size
        real = slice(0, size)
        if self.stacked is None:

            def piece(expert: int, part: str, shape: tuple[int, int], *place: int | slice) -> Piece:
                return Piece(f"{name}.experts.{expert}.{part}.weight", shape, (expert, *place))

            *gate_up, down = self.parts
            sides = [*enumerate(gate_up)]
            return (
                [piece(e, part, (size, hidden), real, i) for e in range(count) for i, part in sides],
                [piece(e, down, (hidden, size), EVERY, real) for e in range(count)],
            )
        both, single = (count, 2 * size, hidden), (count, hidden, size)
        if self.transposed:
            both, single = (count, hidden, 2 * size), (count, size, hidden)
        stacked, last = (
            Piece(f"{name}.{tensor}", shape, transposed=self.transposed, either=self.either)
            for tensor, shape in zip(self.stacked, (both, single), strict=True)
        )
        halves = [
            stacked._replace(part=(self.real, real, i), rows=(EVERY, slice(i * size, (i + 1) * size)))
            for i in range(2)
        ]
        return halves, [last._replace(part=(self.real, EVERY, real))]

    @property
    def group(self) -> int:
        """Intermediate results that a device keeps together."""
        return 1

    @property
    def laid(self) -> tuple[int, int]:
        """The number of experts and their intermediate size in this layout, over all devices."""
        config, sizes = self.config, self.sizes
        experts, least = sizes.count, self.group
        if config.expert_shards > 1:
            experts = -(-sizes.count // config.expert_shards) * config.expert_shards
        else:
            least *= config.shards
        return experts, -(-sizes.size // least) * least

    @property
    def real(self) -> slice:
        """The experts that are no padding."""
        return EVERY if self.laid[0] == self.sizes.count else slice(0, self.sizes.count)

    def own_size(self) -> int:
        """Intermediate size of this device's part of an expert."""
        return self.laid[1] // (1 if self.config.expert_shards > 1 else self.config.shards)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of each token's experts, float32 [N, k], and the experts, int32 [N, k]."""
        weights, chosen = lax.top_k(
            jax.nn.softmax(dense(x, self.router[...], dtype=jnp.float32)), self.sizes.per_token
        )
        if self.sizes.normalize:
            weights /= weights.sum(-1, keepdims=True)
        return weights, chosen

    def entering(self, x: jax.Array) -> jax.Array:
        """The experts' input, computed from the router's."""
        return x

    def gate(self, gate_up: jax.Array) -> jax.Array:
        """[rows, size, 2] -> [rows, size]."""
        return gated(gate_up, self.config.activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return all_reduce(self.own_part(x))

    def batch_dependent(self, device: jax.Device) -> str | None:
        """A GPU's own kernel multiplies blocks of one size, whatever an expert's number of rows."""
        if device.platform == "cpu":
            return None
        size = self.own_size()
        x: Any = jax.ShapeDtypeStruct((1, self.config.hidden_size), self.dtype)
        weights = self.gate_up[...], self.down[...]
        each = [why_product_unsupported(x, weight, grouped=True, device=device) for weight in weights]
        why = next(filter(None, [*each, why_sizes_unsupported((size, size), grouped=False)]), None)
        return why and f"experts, whose products XLA may sum by an expert's number of rows ({why})"

    def working(self, tokens: int) -> Working:
        """Rows in the experts' order, where each expert may start a tile of eight; counts for that order; and
        as an MLP.
        """
        config, sizes = self.config, self.sizes
        tokens *= max(config.expert_shards // config.shards, 1)  # of all ranks
        rows = 8 * min(sizes.count, tokens) + tokens * sizes.per_token
        each = 2 * config.hidden_size + 3 * self.own_size() + 3 * sizes.count
        return Working(
            channels=4 * config.padded(config.intermediate_size) // config.shards, bytes=4 * rows * each
        )

    def own_part(self, x: jax.Array) -> jax.Array:
        """The partial result of what this device has. The sum over the devices of `tensor` is the result."""
        y = self.chosen_part(x)
        return y if self.shared is None else y + self.shared.own_part(x)

    def chosen_part(self, x: jax.Array) -> jax.Array:
        """The partial result of this device's experts, or its part of each. Ranks of `data` compute the rows
        of all with their experts.
        """
        x = gather_rows(x, DATA)
        weights, chosen = self.route(x)
        x = self.entering(x)
        experts, apart = self.held(chosen)
        params = self.gate_up[...], self.down[...], value(self.gate_up_bias)
        eager = any(weight.eager for weight in params[:2])
        apply = self.by_block if traced_for_cpu() and not eager else self.by_group
        y = apply(x, experts, *params)
        y = _weighted(y, weights)
        if self.down_bias is not None:
            bias = _weighted(self.down_bias.at[experts].get(mode="fill", fill_value=0), weights)
            y += bias if apart else jnp.where(jnp.equal(shard_index(), 0), bias, 0)  # results are summed
        return reduce_scatter(y.astype(x.dtype), DATA)

    def held(self, chosen: jax.Array) -> tuple[jax.Array, bool]:
        """The numbers of chosen experts among those that this device has, or a number beyond them; and
        whether other devices have other experts.
        """
        if self.config.expert_shards == 1:
            return chosen, False
        count = self.laid[0] // self.config.expert_shards
        number = chosen - shard_index(EXPERTS) * count
        return jnp.where((number >= 0) & (number < count), number, count), True

    def by_group(
        self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None
    ) -> jax.Array:
        """Applies experts chosen [rows, k] to x [rows, hidden] -> [rows, k, hidden], zeros from experts
        beyond this device's. Sorts rows by expert.
        """
        k, device = chosen.shape[1], traced_for()
        among = self.sizes.count if self.config.expert_shards > 1 else None
        groups = grouped(chosen.reshape(-1), gate_up.shape[0], among)
        y = gate_up.grouped_product(x[groups.row // k], groups, device=device)
        inner = self.gate(y if bias is None else y + bias[groups.owner].astype(y.dtype))
        out = down.grouped_product(inner, groups, device=device)
        return self._placed(out, groups.place).reshape(*chosen.shape, -1)

    def by_block(
        self, x: jax.Array, chosen: jax.Array, gate_up: Weight, down: Weight, bias: jax.Array | None = None
    ) -> jax.Array:
        """Does as `by_group`, in blocks of rows that share an expert. On a CPU, ragged_dot copies all weights
        and multiplies by all of them.
        """
        experts, (rows, k), hidden = gate_up.shape[0], chosen.shape, x.shape[1]
        rows *= k
        block = min(8 * -(-rows // (8 * self.sizes.count)), MAX_BLOCK)
        sizes, rank = counted(chosen.reshape(-1), experts)
        blocks = -(-sizes // block)
        ends = jnp.cumsum(blocks)
        count = min(experts, rows) + rows // block  # maximum number of blocks
        place = (ends - blocks)[chosen.reshape(-1)] * block + rank
        if self.config.expert_shards > 1:
            place = jnp.where(chosen.reshape(-1) < experts, place, count * block)
        padded = jnp.zeros((count * block, hidden), x.dtype).at[place].set(jnp.repeat(x, k, axis=0))
        tokens = jnp.zeros(count * block, jnp.int32).at[place].set(jnp.arange(rows, dtype=jnp.int32) // k)

        def one(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            expert, rows, tokens = args
            y = dense(rows, gate_up.of_expert(expert, tokens), None if bias is None else bias[expert])
            return dense(self.gate(y), down.of_expert(expert, tokens))

        def if_used(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
            """Most blocks are empty where other devices have most experts."""
            used, *block = args
            y: jax.Array = lax.cond(used, one, lambda block: jnp.zeros_like(block[1]), tuple(block))
            return y

        index = jnp.arange(count)
        owners = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts - 1)
        each = owners, padded.reshape(count, block, hidden), tokens.reshape(count, block)
        apart = self.config.expert_shards > 1
        y: jax.Array = lax.map(if_used, (index < ends[-1], *each)) if apart else lax.map(one, each)
        return self._placed(y.reshape(-1, hidden), place).reshape(*chosen.shape, hidden)

    def _placed(self, y: jax.Array, place: jax.Array) -> jax.Array:
        """The rows at these places; zeros where a place is beyond all."""
        if self.config.expert_shards == 1:
            return y[place]
        placed: jax.Array = y.at[place].get(mode="fill", fill_value=0)
        return placed


class SharedExperts(Experts):
    """The result of the MLP that all tokens share is multiplied by a gate."""

    shared_name = "shared_expert"

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        gate = 1, self.config.hidden_size
        piece = Piece(f"{name}.shared_expert_gate.weight", gate)
        self.shared_gate = matrix(gate, dtype, (None, None), piece, exact=True, adaptable=True)

    def own_part(self, x: jax.Array) -> jax.Array:
        assert self.shared is not None
        gate = jax.nn.sigmoid(dense(x, self.shared_gate[...], dtype=jnp.float32)).astype(x.dtype)
        return self.chosen_part(x) + gate * self.shared.own_part(x)


def _weighted(y: jax.Array, weights: jax.Array) -> jax.Array:
    """y [N, k, hidden], weights [N, k] -> float32 [N, hidden]. A GPU gathers, multiplies and adds in one
    kernel.
    """
    return (y.astype(jnp.float32) * weights[..., None]).sum(1)


def qwen_experts(
    hf: Fields, count: int, per_token: int, size: int, shared_size: int = 0, *, normalize: bool = False
) -> MixtureOfExperts:
    """The experts of Qwen's models.

    Args:
        per_token, size, shared_size, normalize: defaults for missing fields; shared_size 0: no shared expert.
    """
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
    layers = range(int(hf["num_hidden_layers"]))
    shared = hf.get("shared_expert_intermediate_size", shared_size) if shared_size else 0
    return MixtureOfExperts(
        layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
        count=int(count),
        per_token=int(hf.get("num_experts_per_tok", per_token)),
        size=int(hf.get("moe_intermediate_size", size)),
        shared_size=int(shared),
        normalize=bool(hf.get("norm_topk_prob", normalize)),
    )
