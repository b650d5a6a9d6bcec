"""From parameters, which are arrays or quantized numbers, to weights, which multiply: `weight_of`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import devices
from pallas_kernels.products.eight_bits import EightBits
from pallas_kernels.products.four_bits import FourBits
from pallas_kernels.products.plain import Plain
from pallas_kernels.products.rows import Rows
from pallas_kernels.products.weight import QuantizedWeight, StoredWeight, Weight
from pallas_kernels.quantization.formats import FP8, WeightFormat
from pallas_kernels.quantization.int4 import KINDS, Int4
from pallas_kernels.quantization.quantized import Quantized

PARAMETERS: dict[type, Any] = {Quantized: EightBits, Int4: FourBits}  # those that are not arrays
NUMBERS: dict[str, Any] = {"int8": EightBits, FP8: EightBits} | dict.fromkeys(KINDS, FourBits)  # of a format


def weight_of(parameter: Any) -> Weight:
    """The weight that a parameter is. Weights are returned as they are."""
    return parameter if isinstance(parameter, Weight) else stored(parameter)


def stored(parameter: Any) -> StoredWeight[Any]:
    """The weight of a parameter as programs take it. Its arrays may be any objects with shapes and dtypes."""
    if isinstance(parameter, StoredWeight):
        return parameter
    weight: StoredWeight[Any] = PARAMETERS.get(type(parameter), Plain)(parameter)
    return weight


def quantized(parameter: Quantized | Int4) -> QuantizedWeight[Any]:
    """The weight of a quantized parameter."""
    weight: QuantizedWeight[Any] = PARAMETERS[type(parameter)](parameter)
    return weight


def abstract(plain: jax.ShapeDtypeStruct, form: WeightFormat, *, parts: int = 1, hadamard: int = 1) -> Any:
    """The abstract parameter of a format that represents an array [*out, in].

    Args:
        parts: into which devices divide the inputs; each has a multiple of the format's group of them, or its
            last group is smaller.
        hadamard: inputs that are transformed together before quantization; 1: not transformed.
    """
    return NUMBERS.get(form.numbers, Plain).abstract(plain, form, parts=parts, hadamard=hadamard)


def is_weight(node: object) -> bool:
    """A leaf predicate for functions on trees of parameters, some of which are several arrays."""
    return type(node) in PARAMETERS or isinstance(node, Weight)


def prepare(parameter: Any) -> None:
    """Registers with XLA the CPU kernels for products of this parameter and rows of its dtype, if there are
    any.
    """
    weight = stored(parameter)
    if devices.cpu_refused() is None and weight.has_cpu_kernel:
        weight.prepare()


def product(x: Rows, weight: Any, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """`Weight.product` by a weight or parameter [*out, in]."""
    return weight_of(weight).product(x, dtype)
