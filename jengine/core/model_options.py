"""The options of EngineConfig that say which model runs, and in which number formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from jengine.base.errors import InvalidArgument
from jengine.base.options import is_a, parse_object, read_as, readable, whole
from jengine.core.quantization import FOUR_BITS, Quantization
from jengine.core.request import SamplingParams
from jengine.vllm.translate import HINTS, value_of
from pallas_kernels.quantization.formats import INT4

DTYPES = ("float32", "bfloat16", "float16")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CheckpointFormat = Literal[
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
    "gguf",
]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

OVERRIDES = "override_generation_config"


def sampling_overrides(option: Any) -> dict[str, Any]:
    """The option override_generation_config, as fields of SamplingParams.

    Raises:
        InvalidArgument: naming the field, its value and the limit.
    """
    fields = parse_object(OVERRIDES, option, ' such as {"temperature": 0.6}')
    if "max_new_tokens" in fields:  # as generation_config.json calls it
        fields["max_tokens"] = fields.pop("max_new_tokens")
    try:
        SamplingParams(**fields)
    except InvalidArgument as wrong:
        raise InvalidArgument(f"{OVERRIDES}.{wrong.field}", wrong.value, wrong.limit) from None
    return fields


known_quantization = is_a(
    str,
    f"must be None, {', '.join(get_args(Quantization))}{HINTS['quantization']}",
    (*get_args(Quantization), *get_args(CheckpointFormat)).__contains__,
)
group_size = is_a(int, "must be 32, 64 or 128", (32, 64, 128).__contains__)
as_dtype = read_as(partial(value_of, "dtype"))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its number formats.

    Args:
        model: `demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id.
        revision: branch, tag or commit of a model on the hub.
        tokenizer: another model to take the tokenizer from; by default the model's own.
        chat_template: a Jinja template for conversations instead of the model's: a file, or the template
            itself.
        generation_config: the source of sampling parameters for requests that set none. auto: the model's
            generation_config.json; vllm: the defaults of SamplingParams.
        override_generation_config: sampling parameters that replace those of generation_config, such as
            {"temperature": 0.6}. They too hold only for requests that set none.
        dtype: number format of weights, activations and cache. auto: the checkpoint's where the device
            supports it, float16 on a GPU without bfloat16; on a CPU float32 instead of a narrower one, unless
            the CPU multiplies that one natively or is measured to be faster with it.
        quantization: quantizes weights on load. By default they stay as the checkpoint has them. int8:
            weights in eight bits, with a scale for each output channel; w8a8: activations too, with a scale
            for each row; fp8: both as e4m3, but embeddings and output heads in int8, emulated on devices
            older than Hopper and Ada; int4: weights in four bits, with a scale for each group of inputs,
            embeddings in int8; int4_mixed: the same, but queries, keys and values, and an MLP's
            last matrix, which lose most, in int8; w4a8: weights as int4, activations as w8a8, embeddings
            as w8a8; none: converts the weights of a quantized checkpoint to
            dtype; awq, gptq, compressed-tensors, modelopt, mxfp4, gguf: keeps them, and requires that the
            checkpoint has this format.
        quantization_group_size: inputs that share a scale in four bits: 32, 64 or 128. Smaller groups lose
            less.
        calibration_data: for four bits, a file of text: the model reads it at the start, and weights are
            rounded so that errors cancel on such text (GPTQ). Takes longer, and the memory of unquantized
            weights; on one device only.
        embeddings: compile programs for embeddings. By default, only if the model's folder has
            sentence-transformers' files, which say how the model computes embeddings.
        weight_updates: compile what `update_weights` runs when the engine starts, so that weights can be
            replaced while it runs, without compilations.
        logprobs_mode: which log probabilities of output tokens are returned. raw_logprobs: those of the raw
            logits; processed_logprobs: those of the distribution that the token is drawn from, after
            temperature, penalties, masks, top_k, top_p and min_p. Those of prompts are raw in any case.
        seed: the start of the random numbers of requests that set no seed.
    """

    model: str = "demo"
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | Path | None = None
    generation_config: Literal["auto", "vllm"] | None = "auto"
    override_generation_config: Annotated[dict[str, Any] | str | None, readable(sampling_overrides)] = None
    dtype: Annotated[Dtype, as_dtype] = "auto"
    quantization: Annotated[Quantization | CheckpointFormat | None, known_quantization] = None
    quantization_group_size: Annotated[int, group_size] = INT4.group
    calibration_data: str | Path | None = None
    embeddings: bool | None = None
    weight_updates: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    seed: Annotated[int, whole()] = 0


def check_model(options: ModelOptions) -> None:
    """Raises InvalidArgument if options of four-bit weights are set for others."""
    for name, default in (("quantization_group_size", INT4.group), ("calibration_data", None)):
        if getattr(options, name) != default and options.quantization not in FOUR_BITS:
            needed = f"needs quantization={', '.join(FOUR_BITS[:-1])} or {FOUR_BITS[-1]}"
            raise InvalidArgument(name, getattr(options, name), needed)
