"""Quantization on load: a parameter is read in the model's dtype, placed on the device, and quantized there.

Parameters that the checkpoint already stores in the wanted form are read as they are, without rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Parameter = Any  # as programs take it: an array, or the numbers and scales of a quantized one
Target = Any  # its abstract form, with shardings


def placed(array: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on its devices; each takes its part."""
    made: jax.Array = jax.block_until_ready(
        jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
    )
    return made
