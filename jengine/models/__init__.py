"""Model families: functions of arrays that take an `attend` function, with each weight declared once.

A new family is a file here, or a part of one: its module, the reader of its config.json, dataclasses of what
only it has, and an entry in FAMILIES, which maps Hugging Face's model_type to a Family. Families of other
packages: see `register`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.core.quantization import FOUR_BITS, QUANTIZATIONS
from jengine.models import facts
from jengine.models.cache import CacheEntry, CacheGroup, cache_groups
from jengine.models.config import ModelConfig as ModelConfig
from jengine.models.family import Decoder, Head, TextPart
from jengine.models.family import Family as Family
from jengine.models.family import Fields as Fields
from jengine.models.layers import Matrix
from jengine.models.quantized import as_stored, format_of, rounded
from jengine.models.registry import DRAFT_HEADS as DRAFT_HEADS
from jengine.models.registry import FAMILIES as FAMILIES
from jengine.models.registry import check, supported
from jengine.models.registry import register as register
from jengine.models.stages import Stage, completed
from jengine.parallel.mesh import rules_of, with_shardings
from pallas_kernels.products.weight import Forms
from pallas_kernels.products.weights import is_weight, stored
from pallas_kernels.quantization.formats import INT4, WeightFormat

Params = Any  # nested dicts of arrays, as `Model.params` describes them


@dataclass(frozen=True, slots=True)
class Model:
    """A model without its weights. params, axes, sources, matrices and adaptable are nested dicts with
    the same structure.

    Attributes:
        params: the abstract parameters of programs: each is a jax.ShapeDtypeStruct, or a Quantized or Int4 of
            several.
        axes: each parameter's logical axis names, a tuple of str or None.
        sources: the checkpoint tensors that make up each parameter, a tuple of pieces.Piece.
        matrices: whether each parameter is read as a Weight.
        adaptable: whether each is a matrix or table that adapters may change.
        group_size, calibrated: as in `build`.
        prefix: as in Decoder.
        text_part, skipped, unread, renamed: as in Family.
        shared, only: as in Head; of a model: empty.
        entries: what each layer keeps in the cache.
        groups: the cache's groups of layers.
        elements: how many elements its matrices have.
        module: declares all of this; its parameters are abstract.
        stage: the stage of a pipeline that has these parameters and groups; None: there is no pipeline.
        elsewhere: names of the tensors that only other stages have.
        absent: abstract parameters of all stages, if there are several.
    """

    config: ModelConfig
    dtype: jnp.dtype
    quantization: str | None
    group_size: int
    calibrated: bool
    params: Params
    axes: Any
    sources: Any
    matrices: Any
    adaptable: Any
    prefix: str
    text_part: TextPart | None
    skipped: tuple[str, ...]
    unread: frozenset[str]
    renamed: Mapping[str, str]
    shared: tuple[str, ...]
    only: str
    entries: tuple[CacheEntry, ...]
    groups: tuple[CacheGroup, ...]
    elements: facts.Elements
    graph: nnx.GraphDef[Any] = field(repr=False)
    module: Decoder = field(repr=False, compare=False)
    stage: Stage | None = None
    elsewhere: frozenset[str] = frozenset()
    absent: Params = field(default=None, repr=False, compare=False)

    @property
    def types(self) -> set[type]:
        """The types of its parts."""
        return {type(part) for _, part in nnx.iter_modules(cast(nnx.Module, self.module))}

    @property
    def quantized(self) -> str:
        """The option quantization that holds, be it given or that of a converted folder, or the format of a
        quantized checkpoint; "" if weights are not quantized.
        """
        if self.quantization is not None:
            return "" if self.quantization == "none" else self.quantization
        return "" if self.config.stored is None else self.config.stored.form

    @property
    def format(self) -> WeightFormat:
        """The format of matrices in layers, unless the checkpoint stores some in another one."""
        if self.config.stored is not None:
            return format_of(self.config.stored)
        formats = QUANTIZATIONS.get(self.quantization or "none")
        plain = stored(jax.ShapeDtypeStruct((), self.dtype)).format
        return plain if formats is None else formats.matrices

    @property
    def unquantized_inputs(self) -> str:
        """How the checkpoint quantizes inputs of products, if products here do not: see
        ModelConfig.quantized_inputs.
        """
        stored = self.config.stored
        applied = self.quantization is not None or (stored is not None and stored.inputs)
        return "" if applied else self.config.quantized_inputs

    def placed(self, mesh: Mesh) -> Params:
        """The abstract parameters with shardings on this mesh."""
        return with_shardings(mesh, self.params, self.axes, expert_shards=self.config.expert_shards)

    @property
    def weights(self) -> str | None:
        """A description of how weights are quantized, or None."""
        if self.quantization not in FOUR_BITS:
            return self.quantization
        return f"{self.quantization}, groups of {self.group_size}{', calibrated' if self.calibrated else ''}"

    def with_forms(self, params: Params, forms: Forms) -> Params:
        """The parameters, with forms of products on a CPU."""

        def formed(parameter: Any, is_matrix: bool) -> Any:
            return stored(parameter).with_forms(forms) if is_matrix else parameter

        return jax.tree.map(formed, params, self.matrices, is_leaf=is_weight) if forms else params

    def sharing(self, model: Model) -> Model:
        """A head with the form that the model has of the parameters that both share."""
        shared = {name: model.params[name] for name in self.shared if name in self.params}
        return dataclasses.replace(self, params={**self.params, **shared})

    @property
    def alone(self) -> Model:
        """Without the parameters of the model that it is a head of."""

        def own(tree: Any) -> Any:
            return {name: value for name, value in tree.items() if name not in self.shared}

        trees = {name: own(getattr(self, name)) for name in ("params", "axes", "sources", "matrices")}
        return dataclasses.replace(self, **trees) if self.shared else self

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP of a layer may be computed at the same time."""
        return any(facts.declared(self.module, "parallel"))

    def working(self, tokens: int) -> tuple[facts.Working, facts.Working]:
        """What a step of so many tokens needs through all layers, beside the residual stream, and for a
        layer's MLP.
        """
        beside, layer = facts.Working(), facts.Working()
        for path, part in nnx.iter_modules(cast(Any, self.module)):
            if hasattr(part, "working"):
                needs = part.working(tokens)
                beside, layer = (beside, layer | needs) if path else (needs, layer)
        return beside, layer

    def batch_dependence(self, device: jax.Device) -> str | None:
        """What makes a row's result depend on other rows on this device, or None."""
        bound = self.bind(self.params)  # to weights as they are stored
        declared = facts.declared(bound, "batch_dependent")
        return next(filter(None, (depends(device) for depends in declared)), None)

    def bind(self, params: Params) -> Decoder:
        """The module with these parameters. It works inside and outside of traced functions."""
        whole = params if self.absent is None else completed(params, self.absent)
        module: Decoder = nnx.merge(self.graph, whole)
        return module

    def head(self, params: Params) -> Head | None:
        """The draft head with these parameters; None for a model."""
        return cast(Head, self.bind(params)) if self.config.family in DRAFT_HEADS else None

    @property
    def gives_states(self) -> bool:
        """Whether an EAGLE-3 head may read its layers' inputs: they have none but the residual stream."""
        return getattr(self.module, "gives_states", False)

    @property
    def takes_embeddings(self) -> bool:
        """Whether prompts may give embeddings: its `hidden` calls `layers.with_images`, and needs no ids."""
        return getattr(self.module, "takes_embeddings", False)

    @property
    def reads(self) -> tuple[int, ...] | None:
        """The layers whose hidden states a head reads, see Head; None for a model."""
        return cast(Head, self.module).reads if self.config.family in DRAFT_HEADS else None


def build(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    max_model_len: int,
    quantization: str | None = None,
    shards: int = 1,
    *,
    expert_shards: int = 1,
    group_size: int = INT4.group,
    calibrated: bool = False,
) -> Model:
    """Declares the model of a family; allocates nothing.

    Args:
        dtype: dtype of weights and activations.
        max_model_len: maximum tokens of a sequence; dynamic rotary scaling is fixed for this length.
        quantization: as in EngineConfig. It applies to matrices of products and to embeddings; routers,
            norms, biases and learned positions keep dtype.
        shards, expert_shards: numbers of devices in the parameters' layout, see ModelConfig.
        group_size: inputs per scale of four-bit weights.
        calibrated: four-bit weights are calibrated, see checkpoints/calibration.py.

    Raises:
        InvalidArgument: a converted folder's parameters are quantized in another way, or cannot be sharded
            over this many devices.
        ModelError: the family is not supported.
    """
    family = DRAFT_HEADS.get(config.family) or supported(config.family)
    if (done := config.converted) is not None:
        saved = None if done.quantization == "stored" else done.quantization
        if quantization not in (None, saved):
            limit = (
                f"must be None or {saved}, as the folder was converted with"
                if saved
                else "must be None: the folder keeps its file's quantization"
            )
            raise InvalidArgument("quantization", quantization, limit)
        if shards * expert_shards > 1:
            raise InvalidArgument(
                "tensor_parallel_size", shards, "must be 1 with a folder that was converted with quantization"
            )
        quantization, group_size, calibrated = saved, done.group_size, done.calibrated
    config = dataclasses.replace(
        config,
        shards=shards,
        expert_shards=expert_shards,
        stored=config.stored if quantization is None else None,
    )
    module = family.module(config, jnp.dtype(dtype), max_model_len)
    check(config.family, module)
    graph, state = nnx.split(module)
    entries = tuple(layer.attention.cache(index) for index, layer in enumerate(module.layers))

    def tree(leaf: Any) -> Any:
        return nnx.to_pure_dict(nnx.map_state(lambda _, parameter: leaf(parameter), state))

    def abstract(parameter: Any) -> Any:
        plain, axes = parameter.get_value(), parameter.get_metadata("axes")
        if not isinstance(parameter, Matrix) or parameter.get_metadata("exact"):
            return plain
        rules = rules_of(axes, expert_parallel=config.expert_shards > 1)
        vocabulary, parts = axes[0] == "vocab", config.shards if axes[-1] in rules else 1
        if config.stored is not None and not vocabulary:
            return as_stored(plain, config.stored, parameter.get_metadata("source"), parts)
        if quantization in (None, "none"):
            return plain
        formats = QUANTIZATIONS[quantization]
        return rounded(plain, axes, formats, parts=parts, group_size=group_size, calibrated=calibrated)

    return Model(
        config=config,
        dtype=jnp.dtype(dtype),
        quantization=quantization,
        group_size=group_size,
        calibrated=calibrated,
        params=tree(abstract),
        axes=tree(lambda p: p.get_metadata("axes")),
        sources=tree(lambda p: p.get_metadata("source")),
        matrices=tree(lambda p: isinstance(p, Matrix)),
        adaptable=tree(lambda p: isinstance(p, Matrix) and p.get_metadata("adaptable")),
        prefix=module.prefix,
        text_part=family.text_part,
        skipped=tuple(name.format(num_layers=config.num_layers) for name in family.skipped),
        unread=family.unread(config),
        renamed=family.renamed,
        shared=getattr(module, "shared", ()),
        only=getattr(module, "only", ""),
        entries=entries,
        groups=cache_groups(entries),
        elements=facts.elements(module, nnx.to_flat_state(state)),
        graph=graph,
        module=module,
    )
