"""Chooses number formats for a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from jengine.core.config import EngineConfig
from jengine.execution.program_folder import write_private
from jengine.execution.spec import cpu_features
from jengine.models.config import ModelConfig
from pallas_kernels.products.weights import product

CACHE_DTYPES = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}
BFLOAT16_SINCE, FP8_SINCE = 8.0, 8.9  # compute capabilities: Ampere, Ada
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # CPU features: x86, ARM
ROWS = 8, 512  # rows of the timed products: decoding, and prompts
REPEATS = 5
# required share of float32's time, so that noise does not change the choice and cause compilations
CLEARLY = 0.8


def choose_dtype(wanted: str, model: ModelConfig, device: jax.Device, root: Path) -> str:
    """The dtype of weights and activations.

    With "auto" this is the checkpoint's dtype if the device supports it. A GPU without bfloat16 gets float16,
    with a warning. A CPU with instructions for bfloat16 products uses bfloat16, since they are at least as
    fast as float32's at half the bytes. Other CPUs use float32, unless products of this model's sizes take
    clearly less time in the checkpoint's dtype. This is measured once and stored in `root`, since saved
    programs depend on it.
    """
    if wanted != "auto":
        return wanted
    if device.platform == "cpu":
        if model.dtype == "float32" or (
            model.dtype == "bfloat16" and not BFLOAT16_FLAGS.isdisjoint(cpu_features().split())
        ):
            return model.dtype
        return _measured(model, device, root)
    if model.dtype == "bfloat16" and _capability(device) < BFLOAT16_SINCE:
        warnings.warn(
            f"{device.device_kind} has no bfloat16: dtype float16 is used, which overflows at 65504",
            stacklevel=3,
        )
        return "float16"
    return model.dtype


def check_formats(config: EngineConfig, device: jax.Device) -> None:
    """Warns if a format is emulated."""
    if multiplies_fp8(device):
        return
    # kernels of attention convert a cache's numbers in registers on all GPUs that have bfloat16
    converts = device.platform != "cpu" and _capability(device) >= BFLOAT16_SINCE
    for name in ("quantization",) if converts else ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8":
            warnings.warn(
                f"{name}='fp8' is emulated on {device.device_kind}, which is slow; use int8", stacklevel=3
            )


def multiplies_fp8(device: jax.Device) -> bool:
    """Whether the device has products of eight-bit floats, which are emulated on others."""
    return device.platform != "cpu" and _capability(device) >= FP8_SINCE


def _capability(device: jax.Device) -> float:
    return float(getattr(device, "compute_capability", "inf"))


def _measured(model: ModelConfig, device: jax.Device, root: Path) -> str:
    features = [cpu_features(), jax.__version__, model.dtype, model.hidden_size, model.intermediate_size]
    file = root / "dtypes" / (hashlib.sha256(json.dumps(features).encode()).hexdigest()[:24] + ".json")
    stored = _kept(file, model)
    if stored is not None:
        return stored
    seconds = {dtype: _product_seconds(model, dtype, device) for dtype in ("float32", model.dtype)}
    dtype = model.dtype if seconds[model.dtype] < CLEARLY * seconds["float32"] else "float32"
    # if it cannot be written, programs cannot be saved either, and that raises a warning
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if _kept(file, model) is None:
            write_private(file, json.dumps({"dtype": dtype, "product_seconds": seconds}).encode())
    # if several processes measure at the same time, all use the first result
    return _kept(file, model) or dtype


def _kept(file: Path, model: ModelConfig) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())["dtype"]
        if stored in ("float32", model.dtype):
            return str(stored)
    return None


def _product_seconds(model: ModelConfig, dtype: str, device: jax.Device) -> float:
    """Minimum seconds of the MLP's first product, for rows of a decode step and of a prompt together."""
    total = 0.0
    with jax.default_device(device):
        weight = jnp.ones((2 * model.intermediate_size, model.hidden_size), dtype)
        for rows in ROWS:
            x = jnp.ones((rows, model.hidden_size), dtype)
            compiled = jax.jit(product).lower(x, weight).compile()
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                compiled(x, weight).block_until_ready()
                times.append(time.perf_counter() - start)
            total += min(times)
    return total
