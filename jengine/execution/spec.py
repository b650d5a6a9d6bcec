"""Everything that determines the programs' shapes, in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.core.lora import LoraLimits
from jengine.devices.device_defaults import cpu_threads
from jengine.execution.batch import BatchLayout
from jengine.execution.images import ImageShapes
from jengine.execution.kv_cache import SHARED, Cache, Page, abstract_cache, abstract_page, page_bytes
from jengine.execution.loras import LoraShapes, Stacks
from jengine.execution.sampling_row import SAMPLING_WORDS
from jengine.execution.slots import KeptStates, SlotState
from jengine.execution.sources import outside_digest, source_digest
from jengine.models import Model, Params
from jengine.models.cache import CacheGroup, paged
from jengine.models.stages import Stage, part_of
from jengine.parallel.collectives import DATA, TENSOR
from jengine.parallel.mesh import rank_mesh
from jengine.table.program_table import SWAPS, ProgramTable, TrunkKey, most_pages, pages_of
from jengine.version import __version__
from pallas_kernels.devices import cpu_refused
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.llvm.max_isa import hidden as hidden_features

# JAX's options that change programs, with their defaults
JAX_OPTIONS: dict[str, object] = {
    "jax_default_matmul_precision": None,
    "jax_disable_most_optimizations": False,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
}
# bytes of pages in transfer between device and host, in each direction; at least those of one call
STAGING = 256 << 20


@dataclass(frozen=True, kw_only=True)
class ExecutionSpec:
    """A model, its cache and its table on a mesh: the inputs from which programs are compiled. No arrays.

    On a mesh with several ranks, which is one with the axis data, arrays of sequences are those of all ranks,
    one after the other along their first axis.

    Attributes:
        max_model_len: maximum tokens of a sequence.
        max_slots: maximum number of running sequences, without the null slot.
        num_pages: number of pages in the cache, the null page included.
        kv_cache_dtype: int8 or float8_e4m3fn; None: the model's dtype.
        num_states: recurrent states of sequences, snapshots and drafts, the null state included; 0: the model
            has none.
        draft_states: those for drafts.
        host_pages: pages of host memory for evicted pages; 0: no host tier and no programs for it.
        product_forms: on a CPU, see `pallas_kernels.products.weight.Forms`.
        processed_logprobs: whether log probabilities of samples are those of the distribution that they are
            drawn from.
        draft: a model or head that drafts on the device; its one cache group is apart. None: there is none.
        lora: limits of adapters; None: there are no programs for them.
        images: the encoder of images; None: there are no programs for it.
        pipeline: the stages, each with its mesh; `mesh` is then the first one's. Empty: there are none.
    """

    model: Model
    mesh: Mesh
    table: ProgramTable
    max_model_len: int
    max_slots: int
    page_size: int
    num_pages: int
    kv_cache_dtype: str | None = None
    num_states: int = 0
    draft_states: int = 0
    host_pages: int = 0
    product_forms: tuple[tuple[str, str], ...] = ()
    processed_logprobs: bool = False
    draft: Model | None = None
    lora: LoraLimits | None = None
    images: ImageShapes | None = None
    pipeline: tuple[tuple[Stage, Mesh], ...] = ()

    @functools.cached_property
    def adapters(self) -> LoraShapes | None:
        """The stacked adapters; None: there are no programs for them."""
        if self.lora is None:
            return None
        lora = self.lora
        return LoraShapes(self.model, self.mesh, lora.max_loras, lora.max_lora_rank, lora.target_modules)

    @property
    def stacks(self) -> Stacks:
        """Abstract arrays of the stacked adapters; none without programs for them."""
        return () if self.adapters is None else self.adapters.stacks

    @property
    def head_stacks(self) -> Stacks:
        """Stacked adapters for programs that compute logits; none if adapters cannot change the head."""
        changed = self.adapters is not None and self.adapters.of(logits=True)
        return self.stacks if changed else ()

    @functools.cached_property
    def drafting(self) -> ExecutionSpec | None:
        """This spec for the draft model alone, with its part of the cache."""
        return (
            None
            if self.draft is None
            else dataclasses.replace(self, model=self.draft, draft=None, lora=None, images=None)
        )

    @functools.cached_property
    def stages(self) -> tuple[ExecutionSpec, ...]:
        """This spec for each stage of the pipeline, with its part of the model; if there is none, this."""
        if not self.pipeline:
            return (self,)
        return tuple(
            dataclasses.replace(self, model=part_of(self.model, stage), mesh=mesh, pipeline=())
            for stage, mesh in self.pipeline
        )

    @property
    def local_stages(self) -> tuple[ExecutionSpec, ...]:
        """The stages of which this process has devices."""
        return tuple(stage for stage in self.stages if stage.here)

    @property
    def here(self) -> bool:
        """Whether this process has some of the devices."""
        return any(device.process_index == jax.process_index() for device in self.mesh.devices.flat)

    @property
    def stage(self) -> Stage:
        """The stage of a pipeline that it describes; without a pipeline, the first and last one."""
        return self.model.stage or Stage()

    @property
    def shards(self) -> int:
        """Devices that share each matrix and each page."""
        return int(self.mesh.shape[TENSOR])

    @property
    def ranks(self) -> int:
        """Groups of devices with sequences of their own."""
        return int(self.mesh.shape.get(DATA, 1))

    def rank(self, number: int) -> ExecutionSpec:
        """This spec for one rank's part of everything."""
        pipeline = tuple((stage, rank_mesh(mesh, number)) for stage, mesh in self.pipeline)
        return dataclasses.replace(self, mesh=rank_mesh(self.mesh, number), pipeline=pipeline)

    @property
    def by_rank(self) -> PartitionSpec:
        """How arrays lie that each rank has for itself, whole on each of its devices."""
        return PartitionSpec(DATA) if self.ranks > 1 else PartitionSpec()

    def of_ranks[T](self, tree: T) -> T:
        """Abstract arrays of one rank, for all ranks."""
        if self.ranks == 1:
            return tree

        def stacked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec(DATA, *x.sharding.spec[1:]))
            return jax.ShapeDtypeStruct((self.ranks * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding)

        of_all: T = jax.tree.map(stacked, tree)
        return of_all

    @property
    def cache_dtype(self) -> np.dtype:
        return jnp.dtype(self.kv_cache_dtype or self.model.dtype)

    @property
    def table_width(self) -> int:
        """Maximum pages of a sequence in a cache group."""
        return pages_of(self.max_model_len, self.page_size)

    def most_pages(self, tokens: int) -> int:
        """Maximum pages that a sequence holds, over all cache groups, until it has this many tokens."""
        return sum(
            most_pages(tokens, group.window, self.page_size, self.table.whole_tiles * self.table.tile_size)
            for group in paged(self.groups)
        )

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return self.model.groups

    @property
    def cached(self) -> tuple[CacheGroup, ...]:
        """All groups of the cache, the draft model's included."""
        return self.groups if self.draft is None else (*self.groups, *self.draft.groups)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def pool_pages(self) -> tuple[int, ...]:
        """Number of pages in each pool, the null page included."""
        return (self.num_pages, self.num_states) if self.num_states else (self.num_pages,)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return self.num_pages * self.page_bytes + self.num_states * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state on each device, over all recurrent layers; 0: there are none."""
        if not self.num_states:
            return 0
        return page_bytes(self.cached, self.groups[-1].pool, self.page_size, self.cache_dtype, self.shards)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on each device."""
        return page_bytes(self.cached, SHARED, self.page_size, self.cache_dtype, self.shards)

    @property
    def staged(self) -> int:
        """Maximum number of pages in transfer between device and host, in each direction."""
        return min(self.host_pages, max(SWAPS, STAGING // self.page_bytes // SWAPS * SWAPS))

    @property
    def staging_bytes(self) -> int:
        """Bytes of these pages on each device."""
        return 2 * self.staged * self.page_bytes

    def layout(self, key: TrunkKey) -> BatchLayout:
        return BatchLayout.of(
            key,
            self.table,
            page_size=self.page_size,
            groups=len(paged(self.groups)),
            states=self.num_states > 0,
            turns=self.turns,
            ahead=self.ahead,
        )

    @property
    def turns(self) -> bool:
        """Whether tokens of images have positions of three numbers (mrope): those that have places do."""
        sections = self.model.config.rope.sections
        return self.images is not None and self.images.encoder.vision.places > 0 and bool(sections)

    @property
    def ahead(self) -> bool:
        """Whether the tokens of an image, or of a prompt, see each other."""
        images = self.images is not None and self.images.encoder.vision.ahead
        return images or self.model.config.prefix_lm

    # Abstract values, with shardings, from which programs are lowered.

    @functools.cached_property
    def params(self) -> Params:
        return self.model.placed(self.mesh)

    @functools.cached_property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Leaves of `params`, which programs take: flattening nested dicts would take 0.15 ms a call."""
        return tuple(jax.tree.leaves(self.params))

    @property
    def both_leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Leaves of the model, then those of the draft model, if there is one."""
        return self.leaves if self.drafting is None else (*self.leaves, *self.drafting.leaves)

    @property
    def weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Leaves of the model and of the draft, without those that a head shares with the model."""
        if self.draft is None:
            return self.leaves
        return (*self.leaves, *jax.tree.leaves(self.draft.alone.placed(self.mesh)))

    @functools.cached_property
    def cache(self) -> Cache:
        return self.of_ranks(
            abstract_cache(self.cached, self.pool_pages, self.page_size, self.cache_dtype, self.mesh)
        )

    @property
    def page(self) -> Page:
        """A page in transfer between device and host."""
        return abstract_page(self.cached, self.page_size, self.cache_dtype, self.mesh)

    @functools.cached_property
    def slots(self) -> SlotState:
        slots, drafts, ints = self.max_slots + 1, self.table.drafts, functools.partial(self.whole, np.int32)
        states: dict[str, Any] = {
            "last": ints(slots, 2),
            "block_table": ints(len(paged(self.groups)), slots, self.table_width),
            "sampling": ints(slots, SAMPLING_WORDS),
        }
        if drafts:
            states["drafts"] = ints(slots, drafts)
        if self.draft is not None and self.draft.reads is not None:
            places = slots, drafts + 1
            both: Any = self.whole(self.draft.dtype, *places, self.draft.config.hidden_size), ints(*places)
            states["kept"] = KeptStates(*both)
        return self.of_ranks(SlotState(**states))

    def whole(self, dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        """An abstract array that is whole on each device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def packed(self, key: TrunkKey) -> jax.ShapeDtypeStruct:
        return self.of_ranks(self.whole(np.int32, self.layout(key).size))

    def entering(self, key: TrunkKey) -> jax.ShapeDtypeStruct:
        """Hidden states of a step's tokens, as a stage gets them from the one before."""
        shape = self.table.tokens(key), self.model.config.hidden_size
        return self.of_ranks(self.whole(self.model.dtype, *shape))

    @property
    def counts(self) -> jax.ShapeDtypeStruct:
        """Counts of every token in every slot, for penalties; allocated when first needed."""
        return self.whole(np.int32, self.max_slots + 1, self.model.config.vocab_size)

    def tiles(self, tiles: int) -> jax.ShapeDtypeStruct:
        """Hidden states of prompt tiles, as a trunk leaves them."""
        return self.whole(self.model.dtype, tiles * self.table.tile_size, self.model.config.hidden_size)

    def _outside(self) -> dict[str, str]:
        """A hash of what other packages define of the model, if anything."""
        vision = [] if self.images is None else [type(self.images.encoder.vision)]
        digest = outside_digest([*self.model.types, *vision])
        return {"family": digest} if digest else {}

    def identity(self) -> dict[str, object]:
        """Everything that a saved program depends on, as plain values: equal ones mean equal programs."""
        device = self.mesh.devices.flat[0]
        return {  # causes before their consequences, since only the first difference is reported
            "platform": device.platform,
            "device": device.device_kind,
            "processor": cpu_features() if device.platform == "cpu" else "",
            "mesh": {name: int(size) for name, size in self.mesh.shape.items()},
            # a saved program runs on these only
            "devices": [int(device.id) for device in self.mesh.devices.flat],
            "processes": len({device.process_index for device in self.mesh.devices.flat}),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            **_changed_options(),
            "plugin": "" if device.platform == "cpu" else _plugins(),
            "flags": [] if device.platform == "cpu" else _gpu_flags(),
            "kernels": cpu_refused() or "llvm" if device.platform == "cpu" else "",
            "product_forms": dict(self.product_forms),
            "jengine": __version__,
            "source": source_digest(),
            **self._outside(),
            "model": _facts(self.model),
            "dtype": str(np.dtype(self.model.dtype)),
            "quantization": self.model.weights,
            "draft": None if self.draft is None else _facts(self.draft),
            **({} if self.model.stage is None else {"stage": dataclasses.asdict(self.model.stage)}),
            **({} if not self.pipeline else {"pipeline": [stage.identity() for stage in self.stages]}),
            "processed_logprobs": self.processed_logprobs,
            "adapters": None if self.adapters is None else self.adapters.facts,
            **({} if self.images is None else {"images": self.images.facts}),
            "cache_dtype": str(self.cache_dtype),
            "max_model_len": self.max_model_len,
            "table": dataclasses.asdict(self.table),
            "max_slots": self.max_slots,
            "page_size": self.page_size,
            "num_states": self.num_states,
            "draft_states": self.draft_states,
            "num_pages": self.num_pages,
        }

    def fingerprint(self) -> str:
        """Hash of the identity, without two entries.

        The number of pages may depend on how much memory is free. The number of a CPU's threads only affects
        speed: XLA divides loops into as many parts.
        """
        identity = {name: fact for name, fact in self.identity().items() if name != "num_pages"}
        if identity["platform"] == "cpu":
            identity["threads"] = cpu_threads()
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=list).encode()).hexdigest()[:24]


def _facts(model: Model) -> dict[str, Any]:
    """What programs depend on of a model's configuration."""
    facts = model.config.plain()
    del facts["eos_token_ids"]  # slots use them, programs do not
    return facts


def _changed_options() -> dict[str, object]:
    """Values of JAX_OPTIONS that are not the defaults."""
    values = jax.config.values
    return {name: values[name] for name, default in JAX_OPTIONS.items() if values[name] != default}


def _plugins() -> str:
    """Installed CUDA plugins of JAX with versions: a program must be loaded by what compiled it."""
    versions = []
    for name in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(versions)


def _gpu_flags() -> list[str]:
    """XLA's flags in the environment that change programs of GPUs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return sorted(flag for flag in flags if flag.startswith("--xla_gpu_") and "dump" not in flag)


@functools.cache
def cpu_features() -> str:
    """The host's instruction sets, without those that `max_isa` hides: other processors may lack some."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return f"{platform.machine()} {platform.processor()}"
    features = next(
        (line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), ""
    ).split()
    hidden = hidden_features(features)
    return " ".join(feature for feature in features if feature not in hidden)


DETERMINISTIC: dict[str, str | bool] = {
    "xla_gpu_exclude_nondeterministic_ops": True
}  # XLA's compiler options: no sums with atomic operations


def why_not_batch_invariant(spec: ExecutionSpec) -> str | None:
    """Why this model, these options or this device do not allow batch_invariant=True, or None.

    Each program has one shape, and sums over devices have one order. So results can only depend on a row's
    place.
    """
    model, device = spec.model, spec.mesh.devices.flat[0]
    depends = model.batch_dependence(device)
    if device.platform != "cpu":
        return None if depends is None else f"{model.config.family} has {depends}"
    if cpu_refused() is not None:
        return f"{cpu_refused()}: XLA's own products may sum a row by its place"
    if depends is not None:
        return f"{model.config.family} has {depends}"
    dtype = str(spec.model.dtype)
    return (
        None
        if dtype in INPUTS
        else f"dtype={dtype}: XLA's own products may sum a row by its place; use one of {', '.join(INPUTS)}"
    )
