"""Where an engine's model comes from: its configuration, its weights, and how it embeds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jengine.checkpoints import choose_embedder, has_output_head, kept_format, load, load_calibrated, read_config, resolve
from jengine.checkpoints.folder import CONFIG_FILES
from jengine.config import EngineConfig
from jengine.execution.spec import ExecutionSpec
from jengine.model_config import ModelConfig
from jengine.models import Params
from jengine.observe.progress import Progress
from jengine.pooling import Embedder


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found, before its weights are read.

    Attributes:
        folder: the model's folder, or its GGUF file.
        config: the model's configuration.
        embedder: how the model embeds; None: it does not.
    """

    folder: Path
    config: ModelConfig
    embedder: Embedder | None

    @classmethod
    def find(cls, options: EngineConfig) -> ModelSource:
        """Finds a model, and reads its configuration.

        Raises:
            ModelError: the model cannot be found or read, or is not supported.
        """
        found = cls._read(options, resolve(options.model, options.revision))
        if found.embedder is None or has_output_head(found.folder, found.config):
            return found
        # The head is the embedding: tokens sampled for embedding requests are not used.
        config = dataclasses.replace(found.config, tie_embeddings=True)
        return dataclasses.replace(found, config=config, embedder=dataclasses.replace(found.embedder, generates=False))

    @classmethod
    def without_weights(cls, options: EngineConfig) -> ModelSource:
        """The same for a model whose weights may be absent."""
        return cls._read(options, resolve(options.model, options.revision, CONFIG_FILES))

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
            return load(self.folder, spec.model, spec.mesh, progress=progress)
        return load_calibrated(self.folder, spec.model, spec.mesh, calibration, progress)
