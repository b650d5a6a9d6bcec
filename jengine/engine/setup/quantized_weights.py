"""Weights that a CPU has quantized, in files, so that a later start does not quantize them again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path

import jax
import numpy as np

from jengine.base.errors import ModelError
from jengine.base.progress import Progress
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.quantization import placed
from jengine.checkpoints.safetensors import READABLE, read_file
from jengine.checkpoints.weights import num_bytes, parts_by_name
from jengine.engine.page_names import files_digest
from jengine.engine.setup.model_source import ModelSource
from jengine.execution.cache_folders import DAY, quantized_files
from jengine.execution.program_folder import UntrustedProgram, make_private, must_be_private, touch
from jengine.execution.sources import source_digest
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model, Params

log = logging.getLogger("jengine")
SMALLEST = 32 << 20  # bytes of quantized weights; fewer are quantized in a moment
CODES = {dtype: code for code, dtype in READABLE.items()}


def load_weights(
    source: ModelSource,
    spec: ExecutionSpec,
    calibration: np.ndarray | None,
    root: Path,
    limit: int,
    progress: Progress,
) -> Params:
    """As `ModelSource.load`. What takes long to quantize is read from a file of the cache; without one, it is
    written while the start goes on.

    Args:
        root: of the cache.
        limit: bytes of all such files together.
    """
    device, model = spec.mesh.devices.flat[0], spec.model
    if (
        device.platform != "cpu"
        or spec.mesh.size > 1
        or model.quantization in (None, "none")
        or source.params is not None
        or is_converted(source.folder)
        or not SMALLEST <= num_bytes(model.params) <= limit
    ):
        return source.load(spec, calibration, progress)
    file = root / "weights" / f"{_digest(source.folder, model, calibration)}.safetensors"
    if (params := _read(file, spec)) is not None:
        log.info("quantized weights: read from %s", file)
        return params
    params = source.load(spec, calibration, progress)
    threading.Thread(target=_write, args=(file, params, limit), name="quantized weights", daemon=True).start()
    return params


def _digest(folder: Path, model: Model, calibration: np.ndarray | None) -> str:
    """Identity of the weights, and of how they are quantized."""
    files = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
    forms = [(name, array.shape, str(array.dtype)) for name, array in parts_by_name(model.params).items()]
    tokens = None if calibration is None else hashlib.sha256(calibration.tobytes()).hexdigest()
    identity = (
        files_digest(folder),
        [file.stat().st_mtime_ns for file in files],
        (source_digest(), jax.__version__),
        (model.config.plain(), model.quantization, model.group_size, str(model.dtype), tokens),
        forms,
    )
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def _read(file: Path, spec: ExecutionSpec) -> Params | None:
    """None: there is no such file, or it cannot be used."""
    targets = spec.model.placed(spec.mesh)
    try:
        must_be_private(file)
        tensors = read_file(file, ())
        touch(file)
        # copies: a CPU device takes over their memory
        arrays = [placed(np.array(tensors[name].array), to) for name, to in parts_by_name(targets).items()]
        return jax.tree.unflatten(jax.tree.structure(targets), arrays)
    except UntrustedProgram:
        return None
    except (ModelError, KeyError, ValueError) as error:
        log.warning("%s is damaged; weights are quantized again: %s", file, error)
        return None


def _write(file: Path, params: Params, limit: int) -> None:
    arrays, header, size = parts_by_name(params), {}, 0
    for name, array in arrays.items():
        offsets = size, size + array.nbytes
        header[name] = {"dtype": CODES[np.dtype(array.dtype)], "shape": array.shape, "data_offsets": offsets}
        size = offsets[1]
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        make_private(file.parent)
        _make_room(file, limit - size)
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as out:
            text = json.dumps(header).encode()
            out.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            os.fsync(out.fileno())
        temporary.replace(file)
        log.info("quantized weights: wrote %s, %d bytes", file, size)
    except (OSError, RuntimeError) as error:  # such as a full disk, or weights that are gone
        log.warning("quantized weights are not written, so the next start quantizes them again: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _make_room(file: Path, room: int) -> None:
    """Removes the files that were not used for the longest time, and what interrupted writers have left."""
    for old in quantized_files(file.parents[1])[::-1]:
        room -= old.stat().st_size
        incomplete = old.suffix != file.suffix and time.time() - old.stat().st_mtime > DAY
        if room < 0 or incomplete:
            old.unlink()
