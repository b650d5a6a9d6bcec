"""What the start of an engine found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jengine.core.pooling import Embedder, Reranker
from jengine.core.request import SamplingParams
from jengine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Started:
    """Results of the start.

    Attributes:
        folder: the model's folder.
        tokenizer_folder: the folder of its tokenizer.
        tokenizer: None if that folder has none.
        default_sampling_params: for requests that set none.
        embedder: how the model embeds; None: there are no programs for embeddings.
        reranker: how the model scores pairs of texts, if its folder says so.
        dtype: of weights, activations and cache, unless they are quantized.
        quantization: number format of quantized weights, see `Model.quantized`; "" if they are not quantized.
        logprobs_mode: see EngineConfig.
        devices: their kind and number.
        programs: number of programs in the table. With warm_up="progressive", some are not ready yet.
        kernels: which implementation serves each operation, and why not the newest one for such devices.
        seconds: duration of each part of the start, in order.
        longest_step: seconds of the most expensive measured step, at short contexts.
    """

    folder: Path
    tokenizer_folder: Path
    tokenizer: Tokenizer | None = None
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    dtype: str = ""
    quantization: str = ""
    logprobs_mode: str = "raw_logprobs"
    devices: str = ""
    programs: int = 0
    kernels: str = ""
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0

    def require_tokenizer(self) -> Tokenizer:
        """Raises ModelError if there is no tokenizer."""
        return Tokenizer.load(self.tokenizer_folder) if self.tokenizer is None else self.tokenizer
