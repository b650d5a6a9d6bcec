"""Activations by their names in Hugging Face, and gated activations for MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import cpu_refused, traced_for_cpu

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,  # the tanh approximation, under its first name
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}
# names of a CPU's kernels
KERNELS = {
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """activation(gate) * up in float32, rounded once.

    Args:
        gate_up: [rows, size, 2]; each gate is next to its factor.
        activation: one of ACTIVATIONS.

    Returns:
        [rows, size], in gate_up's dtype.
    """
    xla = partial(_by_xla, activation=activation)
    kernel = KERNELS.get(activation)
    if kernel is None or not traced_for_cpu() or cpu_refused() is not None:
        return xla(gate_up)
    from pallas_kernels.elementwise import cpu as elementwise

    if not elementwise.gates(gate_up):
        return xla(gate_up)
    y: jax.Array = lax.platform_dependent(
        gate_up, cpu=partial(elementwise.gated, activation=kernel), default=xla
    )
    return y


def _by_xla(gate_up: jax.Array, activation: str) -> jax.Array:
    wide = gate_up.astype(jnp.float32)  # of every second number; a CPU vectorizes this only for float32
    return (ACTIVATIONS[activation](wide[..., 0]) * wide[..., 1]).astype(gate_up.dtype)
