"""Models on disk: where they are, what they are, and their weights on the device."""

from jengine.checkpoints.conversion import convert
from jengine.checkpoints.folder import read_config, read_sampling_defaults, resolve
from jengine.checkpoints.weights import load

__all__ = ["convert", "load", "read_config", "read_sampling_defaults", "resolve"]
