"""Models on disk: locating them, reading their configuration, and loading their weights onto the device."""

from jengine.checkpoints.calibration import load_calibrated, read_text
from jengine.checkpoints.conversion import convert
from jengine.checkpoints.folder import kept_format, read_config, read_sampling_defaults, resolve
from jengine.checkpoints.output_head import eagle3_config, has_output_head, mtp_config
from jengine.checkpoints.sentence_transformers import choose_embedder, read_reranker
from jengine.checkpoints.weights import has_tensors, load

__all__ = [
    "choose_embedder",
    "convert",
    "eagle3_config",
    "has_output_head",
    "has_tensors",
    "kept_format",
    "load",
    "load_calibrated",
    "mtp_config",
    "read_config",
    "read_reranker",
    "read_sampling_defaults",
    "read_text",
    "resolve",
]
