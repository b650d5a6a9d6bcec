"""The weights of a running engine, and how new ones take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.encoder import encoder_makers
from jengine.checkpoints.in_memory import PLACE, Tensors, assemble_on_devices, in_memory, own_names, places_of
from jengine.checkpoints.weights import is_source, makers
from jengine.core.weights import FIRST_VERSION, Version
from jengine.engine.setup.model_source import ModelSource
from jengine.execution.device_state import DeviceState
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model
from pallas_kernels.products.weights import is_weight, stored


class NewWeights(NamedTuple):
    """Checked weights: functions that make the parameters, in order, and whether these may be the caller's
    arrays; and the same for the images' encoder. None: it keeps its own.
    """

    makers: list[Callable[[], Any]]
    shared: bool
    encoder: list[Callable[[], Any]] | None = None


class FixedWeights:
    """Weights that cannot be replaced.

    Attributes:
        updatable: whether `replace` is supported.
        params: the abstract parameters, with shardings.
        version: of the weights that steps use.
        there: whether there are weights. An update that fails half way, and sleep at level 2, leave none.
        shared: whether the caller may hold the same arrays.
    """

    updatable = False

    def __init__(self, params: Any = None, *, shared: bool = False) -> None:
        self.params, self.version = params, FIRST_VERSION  # type: Any, Version
        self.there, self.shared = True, shared

    def check(self, weights: Any, *, check_finite: bool) -> NewWeights:
        """Checks new weights against the model's declarations. Changes nothing.

        Raises:
            InvalidArgument: the engine takes no updates, or these are no weights.
            ModelError: a tensor is missing, unknown, or has another shape or dtype, or is not finite.
        """
        raise InvalidArgument("weight_updates", False, "must be True at the start to update weights")

    def replace(self, new: NewWeights, version: Version) -> None:
        """Puts checked weights in the place of the others, one at a time. No step may be in flight."""
        raise NotImplementedError


class LiveWeights(FixedWeights):
    """Weights that can be replaced, after `warm` without compilations.

    Args:
        folder: of the model's configuration.
    """

    updatable = True

    def __init__(self, folder: Path, spec: ExecutionSpec, state: DeviceState, *, shared: bool) -> None:
        super().__init__(spec.params, shared=shared)
        self._folder, self._spec, self._state = folder, spec, state

    def check(self, weights: Any, *, check_finite: bool) -> NewWeights:
        model, tensors = self._spec.model, in_memory(weights)
        if not (shared := own_names(model, tensors)):
            _check_dtypes(model, tensors)
        made, images = makers(self._folder, model, self._spec.params, tensors), self._spec.images
        encoder = None
        if images is not None and not shared:
            encoder = encoder_makers(images.params, images.encoder.sources, tensors)
        if check_finite:
            _check_finite(tensors, np.dtype(model.dtype))
        return NewWeights(made, shared, encoder)

    def replace(self, new: NewWeights, version: Version) -> None:
        state, self.there = self._state, False
        tree = jax.tree.structure(self._spec.params)
        old = state.take_leaves()
        if old:  # sleep at level 2 leaves none
            old = jax.tree.leaves(jax.tree.unflatten(tree, old), is_leaf=is_weight)
        with jax.set_mesh(None):  # the caller's context may have another mesh
            state.put_leaves(_in_turn(old, new.makers))
            if new.encoder is not None:
                state.encoder_leaves = tuple(_in_turn(state.take_encoder(), new.encoder))
        self.version, self.there, self.shared = version, True, new.shared


def _in_turn(old: list[Any], made: list[Callable[[], Any]]) -> list[Any]:
    """The leaves of new parameters. Empties both lists: an old one is freed before the new one is made."""
    leaves = list[Any]()
    old.reverse()
    made.reverse()
    while made:
        if old:
            old.pop()
        leaves += jax.tree.leaves(made.pop()())
    return leaves


def why_not_updatable(model: Model, source: ModelSource, processes: int) -> str | None:
    """The reason for which this model's weights cannot be replaced, or None."""
    if processes > 1:
        return f"num_processes={processes}: weights are handed to a single process"
    if model.calibrated:
        return "weights calibrated with calibration_data cannot be replaced: calibration reads a checkpoint"
    if is_gguf(source.folder) or is_converted(source.folder):
        return f"must be False with a GGUF file or a converted folder: {source.folder.name} has its own names"
    if model.config.stored is not None:
        return (
            f"the checkpoint stores weights as {model.config.stored.form}; quantization='none' or one of"
            " jengine's converts them to what plain weights can replace"
        )
    return None


def warm(spec: ExecutionSpec) -> None:
    """Compiles what updates run: assembly and quantization of each form of parameter and dtype."""
    _warm(spec.params, spec.model.sources, dtypes(spec.model))
    if spec.images is not None:
        _warm(spec.images.params, spec.images.encoder.sources, dtypes(spec.model))


def _warm(targets: Any, sources: Any, dtypes: Iterable[np.dtype]) -> None:
    sources = jax.tree.leaves(sources, is_leaf=is_source)
    done = set[Any]()
    for target, source in zip(jax.tree.leaves(targets, is_leaf=is_weight), sources, strict=True):
        names, places = places_of(source)
        parts, tree = jax.tree.flatten(target)
        form = tree, tuple((part.shape, part.dtype, part.sharding.spec) for part in parts), places
        if form in done:
            continue
        done.add(form)
        shapes = {piece.name: piece.shape for piece in source}
        everywhere = NamedSharding(stored(target).plain.sharding.mesh, PartitionSpec())
        for dtype in dtypes:
            zeros = {name: jax.device_put(np.zeros(shapes[name], dtype), everywhere) for name in names}
            stored(target).fit(assemble_on_devices(stored(target).plain, source, zeros))


def dtypes(model: Model) -> tuple[np.dtype, ...]:
    """The dtypes of tensors that updates take: the model's and float32."""
    return tuple(dict.fromkeys((jnp.dtype(model.dtype), jnp.dtype(jnp.float32))))


def _check_dtypes(model: Model, tensors: Tensors) -> None:
    taken = dtypes(model)
    for name, tensor in tensors.items():
        if tensor.array.dtype not in taken:
            reason = f"has dtype {tensor.array.dtype}; updates take {' and '.join(map(str, taken))}"
            raise ModelError(reason, file=PLACE, tensor=name)


def _check_finite(tensors: Tensors, dtype: np.dtype) -> None:
    """Checks numbers in the dtype that the devices store."""
    for name, tensor in tensors.items():
        parts = [tensor.array]
        if isinstance(tensor.array, jax.Array):
            parts = [shard.data for shard in tensor.array.addressable_shards]
        with np.errstate(over="ignore"):
            if not all(np.isfinite(np.asarray(part).astype(dtype)).all() for part in parts):
                raise ModelError(f"has a number that is not finite in {dtype}", file=PLACE, tensor=name)
