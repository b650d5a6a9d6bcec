"""Converts a model to jengine's checkpoint format, parameter by parameter."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.progress import progress_bar
from jengine.checkpoints import orbax
from jengine.checkpoints.calibration import check_stateless, load_calibrated, read_text
from jengine.checkpoints.converted import PARAMS, REVISED, REVISION, has_orbax, is_converted, write_config
from jengine.checkpoints.folder import read_config, resolve
from jengine.checkpoints.stored import Tensor
from jengine.checkpoints.weights import assemble, load, parts_by_name, read
from jengine.core.config import EngineConfig
from jengine.core.model_options import DTYPES, Dtype
from jengine.core.quantization import Quantization
from jengine.hub.files import IN_FOLDERS
from jengine.models import Model, build
from jengine.models.config import Converted, ModelConfig
from jengine.parallel.mesh import make_mesh
from jengine.text.gguf_tokenizer import write_tokenizer
from jengine.text.tokenizer import Tokenizer
from pallas_kernels.quantization.formats import INT4

COPIED = ("*.json", "*.jinja", "*.model", "*.txt", *IN_FOLDERS)


def convert(
    model: str,
    out: str | Path,
    *,
    revision: str | None = None,
    dtype: Dtype = "auto",
    quantization: Quantization | None = None,
    quantization_group_size: int = INT4.group,
    calibration_data: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Writes a folder with parameters in the layout of compiled programs. It loads like any other model.
    Returns its path.

    Host memory holds up to orbax.BATCH bytes of parameters and the one that fills the batch; the model's
    files are mapped. With quantization it holds all parameters, and with calibration also the unquantized
    ones. The folder is named `out` when everything is written, and `out` with the suffix .incomplete until
    then.

    Args:
        model: `demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id.
        out: a new or empty folder.
        dtype: dtype of the stored parameters. "auto" keeps each parameter's dtype, so the folder loads
            without loss at any dtype. With quantization, this is the dtype of parameters that are not
            quantized, and "auto" is the checkpoint's; a GGUF file's is that in which it would be loaded.
        quantization, quantization_group_size, calibration_data: as in EngineConfig, but applied once here
            instead of at each start. The folder then loads on one device. By default, what a GGUF file has in
            four bits stays so; "none" converts it to dtype.

    Raises:
        InvalidArgument: an option is not supported, or `out` is not empty, cannot be written, or is being
            written.
        ModelError: the model cannot be read, is not supported or is already converted, or writing failed.
    """
    if dtype not in ("auto", *DTYPES):
        raise InvalidArgument("dtype", dtype, f"must be auto, {', '.join(DTYPES)}")
    folder = resolve(model, revision)
    if is_converted(folder):
        raise ModelError("is converted already", file=folder)
    options = EngineConfig(
        model=model,
        quantization=None if quantization == "none" else quantization,
        quantization_group_size=quantization_group_size,
        calibration_data=calibration_data,
    )
    config = read_config(folder)
    if quantization not in (None, "none", *get_args(Quantization)):
        limit = f"must be {', '.join(get_args(Quantization))}"
        raise InvalidArgument("quantization", quantization, limit)
    as_stored = is_gguf(folder) and config.stored is not None and quantization is None
    target: Any = "stored" if as_stored else options.quantization
    if not as_stored:
        config = dataclasses.replace(config, stored=None, quantized_inputs="")
    whole: Dtype = config.dtype if dtype == "auto" and is_gguf(folder) else dtype  # type: ignore[assignment]
    if dtype != "auto":
        config = dataclasses.replace(config, dtype=dtype)
    if target is None:
        declared = build(config, config.dtype, config.max_position)
        arrays = _parameters(declared, read(folder, declared), whole, progress)
    else:
        done = Converted(
            quantization=target,
            group_size=quantization_group_size,
            calibrated=calibration_data is not None,
            revision=REVISION if target in REVISED else 1,
        )
        arrays = _quantized(folder, options, config, done, progress)
        config = dataclasses.replace(config, converted=done)
    with _new_folder(Path(out)) as unfinished:
        orbax.save(unfinished / PARAMS, arrays)
        _copy_files(folder, unfinished)
        write_config(unfinished, config)
    return Path(out)


def _quantized(
    folder: Path, options: EngineConfig, config: ModelConfig, done: Converted, progress: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every array's name and value, quantized for one device, or as it is stored."""
    data = options.calibration_data
    form: Any = {"group_size": done.group_size, "calibrated": done.calibrated}
    declared = build(config, config.dtype, config.max_position, options.quantization, **form)
    if data is None:
        params = load(folder, declared, make_mesh(1), progress)
    else:
        check_stateless(declared, data)
        tokens = read_text(data, Tokenizer.load(folder))
        params = load_calibrated(folder, declared, make_mesh(1), tokens, progress)
    for name, array in parts_by_name(params).items():
        yield name, np.asarray(array)


def _parameters(
    model: Model, tensors: dict[str, Tensor], dtype: Dtype, progress: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every parameter's name and value, assembled one at a time."""
    sources = jax.tree.leaves(model.sources, is_leaf=lambda node: isinstance(node, tuple))
    todo = []
    for (name, leaf), source in zip(orbax.by_name(model.params).items(), sources, strict=True):
        # holds all pieces exactly
        common = functools.reduce(jnp.promote_types, (tensors[piece.name].array.dtype for piece in source))
        todo.append((name, jax.ShapeDtypeStruct(leaf.shape, common if dtype == "auto" else dtype), source))
    total = sum(target.size * target.dtype.itemsize for _, target, _ in todo)
    with progress_bar(total=total, desc="converting", unit="B", unit_scale=True, show=progress) as bar:
        for name, target, source in todo:
            yield name, assemble(target, source, tensors)
            bar.update(target.size * target.dtype.itemsize)


def _copy_files(folder: Path, to: Path) -> None:
    """Copies the tokenizer, the chat templates and the model's other files, without weights. A GGUF file
    contains them.
    """
    if is_gguf(folder):
        write_tokenizer(folder, to)
        return
    for pattern in COPIED:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):  # indexes of the original tensor files
                target = to / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `out` at the end. The next attempt removes the remains of an interrupted
    one.
    """
    out = out.expanduser().resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InvalidArgument("out", str(out), "must be a new or an empty folder")
    unfinished = out.with_name(out.name + ".incomplete")
    with contextlib.ExitStack() as at_end:
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            lock = os.open(unfinished, os.O_RDONLY)
            at_end.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_rest(unfinished)
        except BlockingIOError:
            raise InvalidArgument("out", str(out), "another process is writing it") from None
        except OSError as wrong:
            raise InvalidArgument("out", str(out), f"cannot be written: {wrong.strerror}") from None
        try:
            yield unfinished
            unfinished.rename(out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _remove_rest(folder: Path) -> None:
    """Removes the remains of an interrupted conversion. Rejects a folder of this name that `jengine convert`
    did not write.
    """
    if any(folder.iterdir()) and not has_orbax(folder):
        raise InvalidArgument(
            "out",
            str(folder),
            "is in the way: `jengine convert` did not write it, and would use this name meanwhile",
        )
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
