"""Which number formats a device is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from jengine.config import EngineConfig, ModelConfig
from jengine.execution.program_folder import write_private
from jengine.execution.spec import cpu_features
from pallas_kernels.products import product

CACHE_DTYPES = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}
BFLOAT16_SINCE, FP8_SINCE = 8.0, 8.9  # compute capabilities: Ampere, Ada
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of a processor: x86's, ARM's
ROWS = 8, 512  # of the products that are timed: decoding, and prompts
REPEATS = 5
CLEARLY = 0.8  # of float32's time: a choice that noise could turn would compile everything again


def choose_dtype(wanted: str, model: ModelConfig, device: jax.Device, root: Path) -> str:
    """The dtype of weights and activations.

    auto is the checkpoint's where the device supports it; float16, with a warning, for bfloat16 on a GPU that lacks it. A CPU takes
    bfloat16 where it has instructions for products of it, which are at least as fast as float32's at half the bytes. Otherwise a CPU takes
    float32 unless products of this model's sizes take clearly less time in the checkpoint's: measured once and kept in `root`,
    since saved programs depend on it.
    """
    if wanted != "auto":
        return wanted
    if device.platform == "cpu":
        if model.dtype == "float32" or (model.dtype == "bfloat16" and not BFLOAT16_FLAGS.isdisjoint(cpu_features().split())):
            return model.dtype
        return _measured(model, device, root)
    if model.dtype == "bfloat16" and _capability(device) < BFLOAT16_SINCE:
        warnings.warn(f"{device.device_kind} has no bfloat16: dtype float16 is used, which overflows at 65504", stacklevel=3)
        return "float16"
    return model.dtype


def check_formats(config: EngineConfig, device: jax.Device) -> None:
    """Warns where a format is emulated."""
    if device.platform != "cpu" and _capability(device) >= FP8_SINCE:
        return
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8":
            warnings.warn(f"{name}='fp8' is emulated on {device.device_kind}, which is slow; int8 is not", stacklevel=3)


def _capability(device: jax.Device) -> float:
    return float(getattr(device, "compute_capability", "inf"))


def _measured(model: ModelConfig, device: jax.Device, root: Path) -> str:
    features = [cpu_features(), jax.__version__, model.dtype, model.hidden_size, model.intermediate_size]
    file = root / "dtypes" / (hashlib.sha256(json.dumps(features).encode()).hexdigest()[:24] + ".json")
    kept = _kept(file, model)
    if kept is not None:
        return kept
    seconds = {dtype: _product_seconds(model, dtype, device) for dtype in ("float32", model.dtype)}
    dtype = model.dtype if seconds[model.dtype] < CLEARLY * seconds["float32"] else "float32"
    with contextlib.suppress(OSError):  # the programs cannot be saved either, and that is warned of
        file.parent.mkdir(parents=True, exist_ok=True)
        if _kept(file, model) is None:
            write_private(file, json.dumps({"dtype": dtype, "product_seconds": seconds}).encode())
    return _kept(file, model) or dtype  # of processes that measured at once, all take what the first one found


def _kept(file: Path, model: ModelConfig) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())["dtype"]
        if kept in ("float32", model.dtype):
            return str(kept)
    return None


def _product_seconds(model: ModelConfig, dtype: str, device: jax.Device) -> float:
    """Of the MLP's first product, for a decode step and a prompt's worth of rows, each at its best."""
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
