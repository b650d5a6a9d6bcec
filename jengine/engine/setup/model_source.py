"""Where a model comes from: its configuration, its weights or files of quantized ones, how it embeds, and the
draft model or head that goes with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import is_gguf
from jengine.base.progress import Progress
from jengine.checkpoints import (
    choose_embedder,
    eagle3_config,
    has_output_head,
    has_tensors,
    kept_format,
    load,
    load_calibrated,
    mtp_config,
    read_config,
    resolve,
)
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.encoder import load_encoder
from jengine.checkpoints.folder import CONFIG_FILES, with_stored_head
from jengine.checkpoints.in_memory import Tensors, in_memory, placed
from jengine.checkpoints.safetensors import READABLE, read_file
from jengine.checkpoints.weights import num_bytes, parts_by_name
from jengine.core.config import EngineConfig
from jengine.core.pooling import Embedder
from jengine.core.speculation import NAME, Speculation
from jengine.engine.page_events import files_digest
from jengine.execution.cache_folders import DAY, quantized_files
from jengine.execution.program_folder import UntrustedProgram, make_private, must_be_private, touch
from jengine.execution.sources import PACKAGES, source_digest
from jengine.execution.spec import ExecutionSpec
from jengine.hub.files import HUB_FILES, WITHOUT_WEIGHTS
from jengine.models import DRAFT_HEADS, Model, Params, build
from jengine.models.cache import apart, paged
from jengine.models.config import ModelConfig
from jengine.models.draft_heads import Eagle3Head, of_model
from jengine.vision.family import RowEncoder
from jengine.vision.folder import no_text, served_vision
from jengine.vision.prompt_embeddings import PromptEmbeddings


def build_draft(draft: ModelConfig, spec: ExecutionSpec) -> Model:
    """Declares the draft model or head. Its layers keep keys and values on the pages of the model's first
    group.

    Raises:
        InvalidArgument: it cannot draft for the model of the spec; says why.
        ModelError: it is not supported.
    """
    head, group, why = draft.family in DRAFT_HEADS, paged(spec.groups)[0], None
    if group.window is not None:
        why = f"not for models whose layers all have a window, here of {group.window} tokens"
    else:
        why = _head_differs(draft, spec.model) if head else _model_differs(draft, spec)
    if why is None:
        built = _build(draft, spec)
        cache_group = apart(built.entries)
        if cache_group is not None:
            return dataclasses.replace(built, groups=(cache_group,))
        why = "its layers keep recurrent states, or keys and values of several sizes"
    field, value = ("method", "mtp") if draft.family.endswith("_mtp") else ("model", draft.family)
    raise InvalidArgument(f"{NAME}.{field}", value, why)


def _build(draft: ModelConfig, spec: ExecutionSpec) -> Model:
    """An MTP head's weights are quantized as the model's are; others come as they are stored."""
    model, arguments = spec.model, (spec.model.dtype, spec.max_model_len)
    over: dict[str, Any] = {"shards": model.config.shards, "expert_shards": model.config.expert_shards}
    if not draft.family.endswith("_mtp"):
        return build(draft, *arguments, None, **over).sharing(model)
    built = build(draft, *arguments, model.quantization, group_size=model.group_size, **over)
    return built.sharing(model)


def _model_differs(draft: ModelConfig, spec: ExecutionSpec) -> str | None:
    """Why a model cannot draft, or None."""
    model = spec.model.config
    if draft.vocab_size != model.vocab_size:
        return f"has {draft.vocab_size} tokens in its vocabulary, but the model has {model.vocab_size}"
    if draft.max_position < spec.max_model_len:
        return f"has {draft.max_position} positions, fewer than max_model_len={spec.max_model_len}"
    return None


def _head_differs(head: ModelConfig, model: Model) -> str | None:
    """Why a head cannot draft, or None. Beyond its positions its drafts are worse, which is no reason."""
    part, config = head.find(Eagle3Head), model.config
    if part is None:
        return None
    if part.vocab_size != config.vocab_size:
        return f"is for {part.vocab_size} tokens in the vocabulary, but the model has {config.vocab_size}"
    if part.hidden_size != config.hidden_size:
        return f"is for hidden states of {part.hidden_size}, but the model's have {config.hidden_size}"
    if not part.own_embedding and head.hidden_size != config.hidden_size:
        return f"has no embedding, and hidden states of {head.hidden_size}, not {config.hidden_size}"
    if not all(0 <= layer <= config.num_layers for layer in part.before):
        return f"reads layers {list(part.before)}, but the model has {config.num_layers}"
    if not model.gives_states:
        return f"not for models of type {config.family}, whose layers have other inputs"
    return None


def with_draft(spec: ExecutionSpec) -> list[ExecutionSpec]:
    """The spec and, if there is a draft model or head, that of this."""
    return [spec] if spec.drafting is None else [spec, spec.drafting]


log = logging.getLogger("jengine")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found, before its weights are read.

    Attributes:
        folder: the model's folder, or its GGUF file.
        config: the model's configuration.
        embedder: how the model embeds; None: it does not.
        params: weights in memory, by the names of a checkpoint's tensors; None: they are in the folder.
        draft: the draft model or head that the options name, if any.
        vision: how it reads images, or prompts' embeddings; None: it takes token ids alone.
    """

    folder: Path
    config: ModelConfig
    embedder: Embedder | None
    params: Tensors | None = None
    draft: ModelSource | None = None
    vision: RowEncoder | None = None

    @property
    def draft_config(self) -> ModelConfig | None:
        return None if self.draft is None else self.draft.config

    @classmethod
    def find(cls, options: EngineConfig, params: Any = None) -> ModelSource:
        """Finds a model, and reads its configuration.

        Args:
            params: weights in memory, see `in_memory`. The folder needs none.

        Raises:
            ModelError: the model cannot be found or read, or is not supported.
            InvalidArgument: `params` are no such arrays, or do not fit the model's folder.
        """
        tensors = None if params is None else in_memory(params)
        folder = resolve(options.model, options.revision, HUB_FILES if tensors is None else WITHOUT_WEIGHTS)
        if tensors is not None and (is_gguf(folder) or is_converted(folder)):
            limit = (
                f"must be None with a GGUF file or a converted folder: {folder.name} has its own names of"
                " tensors"
            )
            raise InvalidArgument("params", counted(len(tensors), "tensor"), limit)
        source = dataclasses.replace(cls._read(options, folder), params=tensors)
        if tensors is not None:
            source = dataclasses.replace(source, config=with_stored_head(source.config, tensors))
        source = dataclasses.replace(source, draft=source._draft(options))
        if source.embedder is None or has_output_head(folder, source.config, tensors):
            return source
        # The head is the embedding: tokens sampled for embedding requests are not used.
        config = dataclasses.replace(source.config, tie_embeddings=True)
        return dataclasses.replace(
            source, config=config, embedder=dataclasses.replace(source.embedder, generates=False)
        )

    @classmethod
    def without_weights(cls, options: EngineConfig) -> ModelSource:
        """Finds a model whose weights may be absent."""
        source = cls._read(options, resolve(options.model, options.revision, CONFIG_FILES))
        return dataclasses.replace(source, draft=source._draft(options, weights=False))

    @classmethod
    def _read(cls, options: EngineConfig, folder: Path) -> ModelSource:
        config = read_config(folder)
        embedder = choose_embedder(options.embeddings, folder, config.hidden_size)
        if options.enable_prompt_embeds:
            return cls(folder, config, embedder, vision=PromptEmbeddings(config.hidden_size))
        return cls(folder, config, embedder, vision=_vision(options, folder))

    def _draft(self, options: EngineConfig, weights: bool = True) -> ModelSource | None:
        """The draft model or head that the options name, if any. weights: whether it must have weights."""
        speculation = Speculation.of(options.speculative_config)
        if speculation is None or not speculation.on_device:
            return None
        if speculation.head == "mtp":
            tied = self.config.tie_embeddings  # the head's output head is the model's
            head = dataclasses.replace(mtp_config(self.folder, self.config), tie_embeddings=tied)
            module: Any = DRAFT_HEADS[head.family].module
            name = module.prefix_of(head)
            if weights and not has_tensors(self.folder, name, self.params):
                why = f"the checkpoint has no tensors of {name}"
                raise InvalidArgument(f"{NAME}.method", "mtp", why)
            return ModelSource(self.folder, head, None, self.params)
        assert speculation.model is not None
        if speculation.head is None:
            changes: dict[str, Any] = {"revision": None, "speculative_config": None, "embeddings": False}
            named = dataclasses.replace(options, model=speculation.model, **changes)
            return ModelSource.find(named) if weights else ModelSource.without_weights(named)
        folder = resolve(speculation.model, None, HUB_FILES if weights else CONFIG_FILES)
        known = weights or any(folder.glob("*.safetensors"))
        has_embeddings = known and has_tensors(folder, "embed_tokens.")
        head = of_model(eagle3_config(folder), self.config.num_layers, has_embeddings)
        return ModelSource(folder, head, None)

    def complete(self, options: EngineConfig) -> EngineConfig:
        """Options in which `embeddings` and `quantization` are what holds for this model.

        Raises:
            InvalidArgument: the checkpoint has another format than `quantization` names.
        """
        quantization: Any = kept_format(options.quantization, self.folder)
        return dataclasses.replace(options, embeddings=self.embedder is not None, quantization=quantization)

    def load(self, spec: ExecutionSpec, calibration: np.ndarray | None, progress: Progress) -> Params:
        """The weights, on the devices.

        Args:
            calibration: tokens to calibrate four-bit weights with, see `read_text`; None: they are rounded.

        Raises:
            ModelError, OutOfMemory: as `checkpoints.load`.
        """
        if calibration is None:
            drafts = spec.draft is not None and bool(spec.draft.only)
            return load(self.folder, spec.model, spec.mesh, progress, self.params, drafts=drafts)
        return load_calibrated(self.folder, spec.model, spec.mesh, calibration, progress, self.params)

    def load_encoder(self, spec: ExecutionSpec) -> Params:
        """The weights of the encoder of images, on the devices; None: there is none."""
        if spec.images is None or not spec.images.leaves:
            return None
        return load_encoder(self.folder, spec.images.params, spec.images.encoder.sources, self.params)

    def load_draft(self, spec: ExecutionSpec, params: Params, progress: Progress) -> Params:
        """The weights of the draft model or head, on the devices; None: there is none. params: the model's,
        some of which a head has, too.
        """
        if self.draft is None or spec.draft is None:
            return None
        shared = {name: params[name] for name in spec.draft.shared if name in params}
        weights = load(self.draft.folder, spec.draft.alone, spec.mesh, progress, self.draft.params)
        return {**weights, **shared}


def _vision(options: EngineConfig, folder: Path) -> RowEncoder | None:
    """How the model reads images; None: it serves text alone. It also does if settings of its images are not
    supported, unless an option asks for images.

    Raises:
        ModelError, InvalidArgument: as `served_vision`.
    """
    if not options.max_images or is_converted(folder):
        return None
    try:
        return served_vision(folder, no_text, options.image_rows, options.image_processing)
    except ModelError as wrong:
        if options.limit_mm_per_prompt is not None or options.image_processing:
            raise
        log.warning("images are not read, only text is served: %s", wrong)
        return None


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
    """Load as `ModelSource.load`. What takes long to quantize is read from a file of the cache, which is
    otherwise written while the start goes on.

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
        (source_digest(), files_digest(PACKAGES / "jengine" / "checkpoints"), jax.__version__),
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
    temporary = file.with_suffix(f".{secrets.token_hex(8)}")
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
