"""Models on disk: locating them, reading their configuration, and loading their weights onto the device."""

from jengine.checkpoints.calibration import check_stateless, check_unconverted, load_calibrated, read_text
from jengine.checkpoints.conversion import convert
from jengine.checkpoints.folder import kept_format, read_config, read_sampling_defaults, resolve
from jengine.checkpoints.output_head import eagle3_config, has_output_head, mtp_config, mtp_prefix
from jengine.checkpoints.sentence_transformers import choose_embedder, read_reranker
from jengine.checkpoints.weights import has_tensors, load

__all__ = [
    "check_stateless",
    "check_unconverted",
    "choose_embedder",
    "convert",
    "eagle3_config",
    "has_output_head",
    "has_tensors",
    "kept_format",
    "load",
    "load_calibrated",
    "mtp_config",
    "mtp_prefix",
    "read_config",
    "read_reranker",
    "read_sampling_defaults",
    "read_text",
    "resolve",
]
