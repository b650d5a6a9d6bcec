"""Loads a checkpoint's weights onto the device, one parameter at a time, and quantizes them there. What is
stored in the wanted form is read as it is, without rounding.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.base.errors import ModelError, OutOfMemory
from jengine.base.gguf_file import is_gguf
from jengine.base.model_files import malformed
from jengine.base.progress import Progress, progress_bar
from jengine.checkpoints import orbax
from jengine.checkpoints.converted import PARAMS, is_converted
from jengine.checkpoints.files import found_tensors
from jengine.checkpoints.in_memory import (
    PLACE,
    Parameter,
    Target,
    Tensors,
    assemble_on_devices,
    own_makers,
    own_names,
    placed,
)
from jengine.checkpoints.layouts import LeafTensor
from jengine.checkpoints.output_head import OUTPUT_HEADS, untied_head
from jengine.checkpoints.quantized_formats import quantization_config, read_fields, read_quantized
from jengine.checkpoints.safetensors import DTYPES, NUMBERS
from jengine.checkpoints.stored import GroupedValues, StoredTensor, Tensor, dense
from jengine.models import DRAFT_HEADS, Model, Params, build
from jengine.models.family import TextPart
from jengine.models.pieces import Piece, pieces_of
from pallas_kernels.products.weight import QuantizedWeight
from pallas_kernels.products.weights import is_weight, quantized, stored
from pallas_kernels.quantization.host_memory import zeros

log = logging.getLogger("jengine")


# [experts, out, in] each
STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def load(
    path: Path,
    model: Model,
    mesh: Mesh,
    progress: Progress = True,
    tensors: Tensors | None = None,
    *,
    drafts: bool = False,
) -> Params:
    """Loads the parameters of `model`: a tree like model.params, with arrays placed by their logical axes.

    Host memory beyond what the device holds peaks at the largest parameter; from a converted folder, at a few
    batches.

    Args:
        path: a folder in Hugging Face's layout, or a converted one.
        tensors: in place of those in the folder's files, which it needs not have. Parameters share no memory
            with them, unless they are parameters themselves; see own_names.
        drafts: whether a head of the model is loaded, too, which takes other tensors of the folder.

    Raises:
        ModelError: a file is missing, truncated or corrupt; a tensor is missing, unknown or of the wrong
            shape.
        OutOfMemory: the device cannot hold the weights.
    """
    total, targets = num_bytes(model.params), model.placed(mesh)
    with progress_bar(total=total, desc="loading weights", unit="B", unit_scale=True, show=progress) as bar:
        try:
            if is_converted(path):
                restore = _from_orbax if model.config.converted is None else _as_it_is
                return restore(path, model, targets, bar.update)
            made = []
            for make in makers(path, model, targets, tensors, drafts=drafts):
                made.append(make())
                bar.update(num_bytes(made[-1]))
            return jax.tree.unflatten(jax.tree.structure(targets, is_leaf=is_weight), made)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemory(
                f"the device cannot hold the weights, {total} bytes as {model.dtype}"
            ) from error


def _from_orbax(path: Path, model: Model, targets: Params, count: Callable[[int], object]) -> Params:
    """Loads a converted folder, which is laid out for one device. Parameters with another layout here are
    disassembled and reassembled."""
    undivided = build(model.config, model.dtype, model.config.max_position)
    sources, parameters = orbax.by_name(model.sources, is_leaf=is_source), orbax.by_name(targets)
    taken_apart = orbax.by_name(undivided.sources, is_leaf=is_source)

    def where(saved: jax.ShapeDtypeStruct, target: Target) -> jax.ShapeDtypeStruct:
        sharding = stored(target).plain.sharding
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(
            saved.shape, saved.dtype, sharding=sharding if saved.shape == target.shape else whole
        )

    def finish(name: str, array: jax.Array) -> Parameter:
        target = parameters[name]
        if array.shape != target.shape:
            tensors = disassemble(np.asarray(array), taken_apart[name])
            array = place_whole(stored(target).plain, sources[name], tensors)
        return stored(target).fit(array)

    return orbax.restore(path / PARAMS, jax.tree.map(where, undivided.params, targets), finish, count)


def _as_it_is(path: Path, model: Model, targets: Params, count: Callable[[int], object]) -> Params:
    """A folder that was converted with quantization: arrays as programs take them."""
    wanted = parts_by_name(targets)
    arrays = orbax.restore(path / PARAMS, wanted, lambda name, array: array, count)
    return jax.tree.unflatten(jax.tree.structure(targets), [arrays[name] for name in wanted])


def parts_by_name(params: Params) -> dict[str, Any]:
    """All arrays by name, those of quantized parameters one by one."""
    return orbax.by_name(params, is_leaf=lambda node: False)


def makers(
    path: Path, model: Model, targets: Params, in_memory: Tensors | None, *, drafts: bool = False
) -> list[Callable[[], Parameter]]:
    """For each parameter, in the order of the tree's leaves, a function that makes it on the devices. Names
    and shapes of all tensors have been checked before this returns.

    Raises:
        ModelError: as in load.
    """
    if in_memory is not None and own_names(model, in_memory):
        return own_makers(targets, in_memory)
    tensors = read(path, model, in_memory, drafts=drafts)

    def make(target: Target, source: tuple[Piece, ...]) -> Parameter:
        with malformed(path):
            if model.config.stored is not None and is_weight(target):
                parameter = _kept(quantized(target), source, tensors)
            else:
                parameter = stored(target).fit(place_whole(stored(target).plain, source, tensors))
        gc.collect(0)  # JAX frees the host's copy in Python's garbage collection
        return parameter

    sources = jax.tree.leaves(model.sources, is_leaf=is_source)
    return [
        partial(make, target, source)
        for target, source in zip(jax.tree.leaves(targets, is_leaf=is_weight), sources, strict=True)
    ]


def place_whole(target: jax.ShapeDtypeStruct, source: tuple[Piece, ...], tensors: Tensors) -> jax.Array:
    stored = {piece.name: tensors[piece.name].array for piece in source}
    arrays = {name: each.read() if isinstance(each, LeafTensor) else each for name, each in stored.items()}
    if all(isinstance(array, jax.Array) for array in arrays.values()):
        return assemble_on_devices(target, source, cast(dict[str, jax.Array], arrays))
    return placed(assemble(target, source, tensors), target)


def _kept(target: QuantizedWeight[Any], source: tuple[Piece, ...], tensors: dict[str, Tensor]) -> Parameter:
    """Loads a parameter whose tensors are stored in the form that programs use."""
    numbers, scale = target.parts
    source = tuple(piece._replace(transposed=False) for piece in source)  # groups are always [out, in]
    group = target.format.group
    values: dict[str, GroupedValues] = {}
    for piece in source:
        tensor = tensors[piece.name]
        if not isinstance(tensor.array, StoredTensor) or not isinstance(
            groups := tensor.array.read(), GroupedValues
        ):
            raise ModelError(
                "is not stored as the configuration says: it is not quantized",
                file=tensor.file,
                tensor=piece.name,
            )
        values[piece.name] = groups if not group else groups.by_group(group)

    def whole(
        target: jax.ShapeDtypeStruct, part: Callable[[GroupedValues], np.ndarray], pieces: tuple[Piece, ...]
    ) -> np.ndarray:
        return assemble(
            target, pieces, {name: Tensor(Path(), part(groups)) for name, groups in values.items()}
        )

    if not group:
        by_output = tuple(
            piece._replace(part=piece.part[: len(scale.shape)], columns=slice(None)) for piece in source
        )
        scales = whole(scale, lambda groups: groups.by_output(), by_output)
        return target.joined(whole(numbers, lambda groups: groups.values, source), scales, None, placed)
    by_group = tuple(piece.grouped(len(target.shape), group) for piece in source)
    scales = whole(scale, lambda groups: groups.scale, by_group)
    offsets = None
    if target.format.offset:  # zero for tensors without offsets
        offsets = whole(
            scale, lambda groups: groups.scale * 0 if groups.offset is None else groups.offset, by_group
        )
    return target.joined(whole(numbers, lambda groups: groups.values, source), scales, offsets, placed)


def num_bytes(tree: Any) -> int:
    """Total bytes of all arrays in a tree, abstract or not."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def read(
    path: Path, model: Model, in_memory: Tensors | None = None, *, drafts: bool = False
) -> dict[str, Tensor]:
    """Reads the model's tensors from a folder in Hugging Face's layout. Checks that all are present with
    their shapes, and no others.

    Args:
        in_memory: tensors in place of those in the folder's files.
        drafts: as in load.

    Raises:
        ModelError: as in load.
    """
    pieces = pieces_of(model.sources)
    names = [*(piece.name for piece in pieces), *sorted(model.elsewhere)]
    if is_gguf(path):
        from jengine.checkpoints.gguf import read_gguf

        config = model.config
        tensors = read_gguf(path, names, (config.num_heads, config.num_kv_heads))
    else:
        tensors, fields = found_tensors(path, in_memory), read_fields(path)
        with malformed(path):
            text = fields.get("text_config") or {}
            if (quantization := quantization_config({**text, **fields})) is not None:
                tensors = read_quantized(tensors, quantization)
        if model.text_part is not None:
            tensors = _of_text(tensors, model.text_part)
        if model.only:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(model.only)}
        for theirs, ours in model.renamed.items():
            tensors = {
                ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                for name, tensor in tensors.items()
            }
        why = "only the next token is predicted"
        if f"{model.config.family}_mtp" in DRAFT_HEADS:
            why = "" if drafts else "method mtp of speculative_config uses them"
        tensors = _without(tensors, model.skipped, why)
        tensors = each_expert(_named(tensors, model.prefix), {*names})
        tensors = {name: tensor for name, tensor in tensors.items() if name not in model.unread}
        tensors |= _turned_back(tensors, pieces)
    if model.elsewhere:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in model.elsewhere}
    place = path if in_memory is None else PLACE
    if model.config.tie_embeddings and (name := untied_head(tensors)) is not None:
        reason = "differs from the embeddings, which the model uses as its output head"
        raise ModelError(reason, file=tensors[name].file, tensor=name)
    check_tensors(place, tensors, pieces, model.config.tie_embeddings, _of_integers(model))
    return tensors


def _of_integers(model: Model) -> set[str]:
    """Names of the tensors of parameters that are integers in programs, too."""
    parameters = zip(
        jax.tree.leaves(model.params, is_leaf=is_weight),
        jax.tree.leaves(model.sources, is_leaf=is_source),
        strict=True,
    )
    return {
        piece.name
        for parameter, source in parameters
        if not is_weight(parameter) and np.issubdtype(parameter.dtype, np.integer)
        for piece in source
    }


def has_tensors(path: Path, prefix: str, tensors: Tensors | None = None) -> bool:
    """Whether a folder has tensors whose names, beside "model.", begin with the prefix."""
    names = found_tensors(path, tensors)
    return any(name.removeprefix("model.").startswith(prefix.removeprefix("model.")) for name in names)


def assemble(target: jax.ShapeDtypeStruct, source: tuple[Piece, ...], tensors: Tensors) -> np.ndarray:
    """Assembles a parameter in new memory: a CPU device may take that over, so it must not be the file's."""
    out = zeros(target.shape, target.dtype)  # padding stays zero
    arrays: dict[str, np.ndarray] = {}
    for piece in source:
        part, stored = out[piece.part], tensors[piece.name].array
        if isinstance(stored, StoredTensor) and piece.as_stored and part.shape == stored.shape:
            stored.fill(part)
            continue
        if piece.name not in arrays:
            arrays[piece.name] = np.atleast_1d(dense(stored))
        part[...] = piece.of(arrays[piece.name]).reshape(part.shape)
    return out


def disassemble(parameter: np.ndarray, source: tuple[Piece, ...]) -> dict[str, Tensor]:
    """Splits a parameter into the tensors from which it was assembled."""
    tensors: dict[str, Tensor] = {}
    for piece in source:
        tensor = tensors.setdefault(piece.name, Tensor(Path(), np.empty(piece.shape, parameter.dtype)))
        part = piece.of(dense(tensor.array))
        part[...] = parameter[piece.part].reshape(part.shape)
    return tensors


def _turned_back(tensors: Tensors, pieces: list[Piece]) -> dict[str, Tensor]:
    """The tensors that are stored as [out, in] where their pieces expect [in, out], as these expect them."""
    turned = {}
    for piece in pieces:
        tensor = tensors.get(piece.name) if piece.either else None
        if tensor is None or isinstance(tensor.array, StoredTensor):
            continue
        if tensor.array.shape == piece.turned_shape:
            turned[piece.name] = Tensor(tensor.file, tensor.array.swapaxes(-1, -2))
    return turned


def is_source(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(piece, Piece) for piece in node)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Adds the prefix that is missing in checkpoints of the bare decoder."""
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name in OUTPUT_HEADS else prefix + name: tensor for name, tensor in tensors.items()}


def _of_text(tensors: dict[str, Tensor], part: TextPart) -> dict[str, Tensor]:
    """The text model's tensors, named as in its own checkpoints."""
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    mine = _without(bare, part.skipped, part.why)
    return {name.removeprefix(part.name).removeprefix("model."): tensor for name, tensor in mine.items()}


def _without(tensors: dict[str, Tensor], skipped: tuple[str, ...], why: str) -> dict[str, Tensor]:
    """The tensors without those whose names begin with these prefixes. Logs a warning if there are any."""
    mine = {name: tensor for name, tensor in tensors.items() if not name.startswith(skipped)}
    if len(mine) < len(tensors) and why:
        parts = ", ".join(name.removesuffix(".") for name in skipped)
        log.warning(
            "%d tensors of %s are not loaded with the model: %s", len(tensors) - len(mine), parts, why
        )
    return mine


def check_tensors(
    path: Path, tensors: dict[str, Tensor], wanted: list[Piece], tied: bool, integers: set[str]
) -> None:
    for piece in wanted:
        if piece.name not in tensors:
            leaves = (tensor.array for tensor in tensors.values() if isinstance(tensor.array, LeafTensor))
            leaf = next((f": no leaf {array.missing(piece.name)}" for array in leaves), "")
            raise ModelError(f"is missing{leaf}", file=path, tensor=piece.name)
        file, array = tensors[piece.name]
        code = next((code for code, dtype in NUMBERS.items() if dtype == array.dtype), None)
        if code is not None and piece.name not in integers:
            raise ModelError(
                f"dtype {code} is not supported; {', '.join(DTYPES)} are", file=file, tensor=piece.name
            )
        if array.shape != piece.shape:
            raise ModelError(
                f"has shape {list(array.shape)}; the configuration needs {list(piece.shape)}",
                file=file,
                tensor=piece.name,
            )
    harmless = set(OUTPUT_HEADS) if tied else set()
    for name in sorted(tensors.keys() - {piece.name for piece in wanted} - harmless):
        raise ModelError("is not part of this model", file=tensors[name].file, tensor=name)


def each_expert(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Replaces such tensors by views: one for each expert and matrix, named as in checkpoints that store them
    one by one.

    Args:
        wanted: names of the model's tensors. Tensors with these names are kept.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = next((parts for end, parts in STACKED.items() if name.endswith(end)), ())
        if name in wanted or not parts or isinstance(tensor.array, StoredTensor) or tensor.array.ndim != 3:
            out[name] = tensor
            continue
        module, rows = name.rpartition(".")[0], tensor.array.shape[1] // len(parts)
        for expert, matrix in enumerate(dense(tensor.array)):
            for i, part in enumerate(parts):
                out[f"{module}.{expert}.{part}.weight"] = Tensor(
                    tensor.file, matrix[i * rows : (i + 1) * rows]
                )
    return out
