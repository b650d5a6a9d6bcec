"""Where an engine's model comes from: its configuration, its weights, and how it embeds."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    mtp_prefix,
    read_config,
    resolve,
)
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.encoder import load_encoder
from jengine.checkpoints.folder import CONFIG_FILES, with_stored_head
from jengine.checkpoints.in_memory import Tensors, in_memory
from jengine.core.config import EngineConfig
from jengine.core.pooling import Embedder
from jengine.core.speculation import NAME, Speculation
from jengine.execution.spec import ExecutionSpec
from jengine.hub.files import HUB_FILES, WITHOUT_WEIGHTS
from jengine.models import Params
from jengine.models.config import ModelConfig
from jengine.models.draft_heads import of_model
from jengine.vision.family import RowEncoder
from jengine.vision.folder import no_text, served_vision
from jengine.vision.prompt_embeddings import PromptEmbeddings

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
        """The draft model or head that the options name, if any.

        Args:
            weights: whether it must have weights.
        """
        speculation = Speculation.of(options.speculative_config)
        if speculation is None or not speculation.on_device:
            return None
        if speculation.head == "mtp":
            tied = self.config.tie_embeddings  # the head's output head is the model's
            head = dataclasses.replace(mtp_config(self.folder, self.config), tie_embeddings=tied)
            name = mtp_prefix(head)
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
        """The weights of the draft model or head, on the devices; None: there is none.

        Args:
            params: the model's, some of which a head has, too.
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
