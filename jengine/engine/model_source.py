"""Where an engine's model comes from: its configuration, its weights, and how it embeds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.base.gguf_file import is_gguf
from jengine.base.progress import Progress
from jengine.checkpoints import (
    choose_embedder,
    has_output_head,
    kept_format,
    load,
    load_calibrated,
    read_config,
    resolve,
)
from jengine.checkpoints.converted import is_converted
from jengine.checkpoints.folder import CONFIG_FILES, HUB_FILES, WITHOUT_WEIGHTS
from jengine.checkpoints.in_memory import Tensors, in_memory
from jengine.core.config import EngineConfig
from jengine.core.pooling import Embedder
from jengine.core.speculation import Speculation
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
from jengine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found, before its weights are read.

    Attributes:
        folder: the model's folder, or its GGUF file.
        config: the model's configuration.
        embedder: how the model embeds; None: it does not.
        params: weights in memory, by the names of a checkpoint's tensors; None: they are in the folder.
        draft: the draft model that the options name, if any.
    """

    folder: Path
    config: ModelConfig
    embedder: Embedder | None
    params: Tensors | None = None
    draft: ModelSource | None = None

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
        named = _draft_options(options)
        draft = None if named is None else cls.find(named)
        found = dataclasses.replace(cls._read(options, folder), params=tensors, draft=draft)
        if found.embedder is None or has_output_head(folder, found.config, tensors):
            return found
        # The head is the embedding: tokens sampled for embedding requests are not used.
        config = dataclasses.replace(found.config, tie_embeddings=True)
        return dataclasses.replace(
            found, config=config, embedder=dataclasses.replace(found.embedder, generates=False)
        )

    @classmethod
    def without_weights(cls, options: EngineConfig) -> ModelSource:
        """The same for a model whose weights may be absent."""
        named = _draft_options(options)
        draft = None if named is None else cls.without_weights(named)
        found = cls._read(options, resolve(options.model, options.revision, CONFIG_FILES))
        return dataclasses.replace(found, draft=draft)

    @classmethod
    def _read(cls, options: EngineConfig, folder: Path) -> ModelSource:
        config = read_config(folder)
        return cls(folder, config, choose_embedder(options.embeddings, folder, config.hidden_size))

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
            return load(self.folder, spec.model, spec.mesh, progress, self.params)
        return load_calibrated(self.folder, spec.model, spec.mesh, calibration, progress, self.params)

    def load_draft(self, spec: ExecutionSpec, progress: Progress) -> Params:
        """The draft model's weights, on the devices; None: there is no draft model."""
        if self.draft is None or spec.drafting is None:
            return None
        return self.draft.load(spec.drafting, None, progress)


def _draft_options(options: EngineConfig) -> EngineConfig | None:
    """Options that name the draft model as the model; None: there is none."""
    how = Speculation.of(options.speculative_config)
    if how is None or how.model is None:
        return None
    changes: dict[str, Any] = {"revision": None, "speculative_config": None, "embeddings": False}
    return dataclasses.replace(options, model=how.model, **changes)
